"""What docs/guide/python.md says: its notebook runs, and the names it lists are there."""

import re
from typing import get_args

import pytest

import penstock as ps
from penstock.api.status import Standing
from penstock.core.cache.store import Status
from tests.conftest import ROOT
from tests.turns import one_day_in

PAGE = (ROOT / "docs" / "guide" / "python.md").read_text()


def section(title):
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def cells():
    return re.findall(r"```python\n(.*?)```", section("A notebook"), re.DOTALL)


@one_day_in(3, of=0)
@pytest.mark.usefixtures("warm_ranks")
def test_the_notebook_of_the_guide_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for cell in cells():
        exec(compile(cell, "docs/guide/python.md", "exec"), names)
    run, losses = names["run"], names["losses"]
    assert isinstance(run, ps.Run)
    assert isinstance(losses, list)
    assert losses[-1] < losses[0]
    assert set(run.status().values()) == {"cached"}
    assert (tmp_path / "outputs" / "faster" / "report.html").is_file()
    assert len(list((tmp_path / "outputs" / "data" / "prepare").glob("*/manifest.json"))) == 1


def test_every_name_of_the_api_is_in_the_guide():
    told = {*re.findall(r"`(?:ps\.|penstock\.)?(\w+)", PAGE)}
    assert {*ps.__all__} - {"__version__"} <= told
    methods = {name for name in vars(ps.Run) if not name.startswith("_")}
    assert methods == set(re.findall(r"`run\.(\w+)", section("`Run`"))) - {"config"}
    for word in (*get_args(Standing), *get_args(Status)):
        assert f"`{word}`" in PAGE or f'"{word}"' in PAGE
