"""What the page on troubleshooting quotes is what the package prints."""

import re

import pytest

from tests.conftest import ROOT
from tests.docs.messages import unknown_parts

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTED = re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("message", QUOTED, ids=lambda message: message.splitlines()[0])
def test_a_quoted_message_is_one_that_the_package_prints(message):
    by_torch = ("CUDA out of memory.", "OutOfMemoryError: CUDA out of memory.")
    unknown = [part for part in unknown_parts(message) if not part.endswith(by_torch)]
    assert unknown == []


def test_a_message_that_nobody_prints_is_found():
    assert unknown_parts("no rank has made progress for … weeks") == ["weeks"]
