"""What the page on troubleshooting quotes is what the package prints, and its settings exist."""

import re

import pytest

from penstock.config.loading.schema_tree import sections
from penstock.config.schema.run import RunConfig
from tests.conftest import ROOT
from tests.docs.messages import unknown_parts

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTED = re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SETTINGS = re.findall(r"`((?:train|data|lora|launch|model|pipeline)\.\w+)", PAGE)


@pytest.mark.parametrize("message", QUOTED, ids=lambda message: message.splitlines()[0])
def test_a_quoted_message_is_one_that_the_package_prints(message):
    by_torch = ("CUDA out of memory.", "OutOfMemoryError: CUDA out of memory.")
    unknown = [part for part in unknown_parts(message) if not part.endswith(by_torch)]
    assert unknown == []


def test_a_message_that_nobody_prints_is_found():
    assert unknown_parts("nothing has moved for … weeks") == ["weeks"]


@pytest.mark.parametrize("setting", sorted(set(SETTINGS)))
def test_a_setting_of_the_page_exists(setting):
    section, _, field = setting.partition(".")
    assert field in {**RunConfig.model_fields, **sections()[section].model_fields} or (
        setting in sections() or setting == "train.output_dir"
    )
