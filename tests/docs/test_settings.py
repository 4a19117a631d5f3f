"""Every setting that a page names is one."""

import re

import pytest

from penstock.config.loading.schema_tree import sections
from tests.conftest import ROOT
from tests.docs.pages import FENCE

SECTIONS = "model|data|train|lora|preference|launch|export|push|pipeline|release"
NAMED = re.compile(rf"(?<![\w./])((?:{SECTIONS})(?:\.[a-z]\w*)+)(?![\w/(]|\.\w)")
PAGES = sorted(
    page
    for page in (*ROOT.glob("docs/**/*.md"), ROOT / "README.md")
    if not page.name.startswith("from-") and page.parent.name != "benchmarks"
)
FILES = (".json", ".jsonl", ".md", ".yaml", ".yml", ".py", ".arrow", ".dump", ".sh", ".gguf")
"""End the names of files, which look like settings."""
FOREIGN = {"model.quantize_base"}
"""Fields of torchtune, on the page that says what to write instead."""


def exists(setting: str) -> bool:
    section, _, field = setting.rpartition(".")
    return setting in sections() or (
        section in sections() and field in sections()[section].model_fields
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_settings_that_a_page_names_exist(page):
    named = set(NAMED.findall(FENCE.sub("", page.read_text()))) - FOREIGN
    assert sorted(name for name in named if not name.endswith(FILES) and not exists(name)) == []


def test_a_setting_that_does_not_exist_is_found():
    assert NAMED.findall("`train.lr`, `train.learning_rate: 1`") == [
        "train.lr",
        "train.learning_rate",
    ]
    assert exists("train.lr")
    assert not exists("train.learning_rate")
