"""Every piece of a run's config that a page shows is valid: its fields, values and combination."""

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from penstock.config.loading import yaml12
from penstock.config.loading.load import loads
from penstock.config.schema.run import RunConfig
from tests.config.values import SMALLEST
from tests.conftest import ROOT

BLOCK = re.compile(r"^( *)```yaml\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
PAGES = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/*/*.md"), ROOT / "README.md"]
ELSEWHERE = {"docs/migrate", "docs/extend.md"}
"""Files of other tools, which `tests/config/dialects` translates, and parts of a package, which
`tests/pipeline/test_extensions.py` builds and runs."""


def is_of_a_run(block: Any) -> bool:
    """Whether the top-level keys are the sections of a run."""
    return isinstance(block, dict) and set(block) <= set(RunConfig.model_fields)


def find_blocks() -> dict[str, dict[str, Any]]:
    """Each config or part of one, by page and line."""
    found: dict[str, dict[str, Any]] = {}
    for page in sorted(PAGES):
        name, text = str(page.relative_to(ROOT)), page.read_text()
        if {name, str(Path(name).parent)} & ELSEWHERE:
            continue
        for match in BLOCK.finditer(text):
            value = yaml12.parse(textwrap.dedent(match[2])).value
            if is_of_a_run(value):
                found[f"{name}:{text[: match.start()].count(chr(10)) + 1}"] = value
    return found


BLOCKS = find_blocks()


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_a_config_or_part_of_one_is_valid(block):
    values = {
        name: {**SMALLEST.get(name, {}), **block.get(name, {})} for name in (*SMALLEST, *block)
    }
    if "model_path" in block.get("model", {}):
        values["model"] = block["model"]
    loads(values)


def test_most_blocks_of_the_pages_are_recognized():
    assert len(BLOCKS) > 20
