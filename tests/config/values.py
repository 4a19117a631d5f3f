"""A smallest valid run, and what a test needs to read refusals."""

from copy import deepcopy
from typing import Any

import pytest

from penstock.config.loading.load import loads
from penstock.core.errors import ConfigError

SMALLEST: dict[str, Any] = {
    "model": {"config_path": "builtin:tiny-qwen3"},
    "data": {"datasets": [{"path": "dummy"}]},
    "train": {"output_dir": "out"},
}


def smallest(**sections: dict[str, Any]) -> dict[str, Any]:
    """The smallest run with settings added, section by section."""
    run = deepcopy(SMALLEST)
    for section, fields in sections.items():
        run.setdefault(section, {}).update(fields)
    return run


def faults_of(**sections: dict[str, Any]) -> list[str]:
    """The lines with which the smallest run with these settings is refused."""
    with pytest.raises(ConfigError) as refusal:
        loads(smallest(**sections))
    return str(refusal.value).splitlines()


def refused_and_mended(
    sections: dict[str, Any], where: str, reason: str, mended: dict[str, Any]
) -> None:
    """Assert that the smallest run with these settings has the one fault, and none with others."""
    told = faults_of(**sections)
    assert len(told) == 1
    assert told[0].startswith(f"{where}: ")
    assert reason in told[0]
    values = smallest(**sections)
    for section, fields in mended.items():
        values.setdefault(section, {}).update(fields)
    loads(values)
