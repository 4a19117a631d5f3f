"""`penstock plan --dry-run` as a command."""

import json
from typing import Any

import pytest

from penstock.cli.plan import dry_run
from tests.cli.command import penstock
from tests.conftest import ROOT
from tests.turns import one_day_in

FSDP = ("--train.data_parallel_mode", "fsdp2")


def plan(*arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON object."""
    said = penstock("plan", ROOT / "configs/quickstart.yaml", "--json", *arguments)
    return said.code, said.last


@one_day_in(3, of=2)
def test_layouts_are_compared_and_the_step_is_traced(tmp_path):
    trace = tmp_path / "trace.json"
    code, found = plan(
        "--dry-run",
        *("--world", "8", "--device-kind", "A100", *FSDP),
        *("--compare", "train.tensor_parallel_size=2", "--trace", str(trace)),
    )
    assert code == 0, found
    one, other = found["dry_run"]
    assert (one["layout"]["shard"], other["layout"]["tensor"]) == (8, 2)
    assert one["device_memory"] == 80e9
    assert one["faults"] == other["faults"] == []
    collective = one["ranks"][0]["collectives"][0]
    assert {"name", "group_size", "dtype", "phase", "where", "times"} < {*collective}
    assert sum(one["ranks"][0]["holders"].values()) == one["memory"] > 0
    seconds = one["ranks"][0]["seconds_by_class"]
    assert {"products", "head", "loss", "attention forward", "optimizer"} < {*seconds}
    assert sum(seconds.values()) == pytest.approx(one["ranks"][0]["compute_seconds"], rel=0.1)
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["cat"] for event in events if event["ph"] == "X"} >= {"forward", "backward"}


@pytest.mark.parametrize(
    "machines", [("--world", "16"), ("--launch.nnodes=2", "--launch.nproc_per_node=8")]
)
def test_several_machines_need_no_place_to_meet(machines, monkeypatch):
    def take_no_step(layouts, *_):
        [(_, run)] = layouts
        return {"machines": run.launch.nnodes}

    monkeypatch.setattr(dry_run, "print_dry_run", take_no_step)
    code, found = plan("--dry-run", *machines, *FSDP, "--train.global_batch_size=64")
    assert code == 0, found
    assert found["machines"] == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--world", "3"), "belong to --dry-run"),
        (("--dry-run", "--compare", "nonsense"), "has no fields"),
        (("--dry-run", "--devices", "7", *FSDP), "no layout of this run on 7 devices"),
        (("--dry-run", "--device-kind", "nonsense"), "nonsense is not known"),
    ],
)
def test_options_that_cannot_be_honored_are_refused(arguments, says):
    code, found = plan(*arguments)
    assert code == 2
    assert says in found["error"]["message"]
