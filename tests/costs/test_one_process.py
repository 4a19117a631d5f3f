"""The layout of unwritten settings in one process: fast where there is room."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from penstock.config.loading.load import loads
from penstock.estimate.costs.device_speed import Machine
from penstock.estimate.costs.one_process import with_one_process_layout
from tests.cli.command import penstock, small_run
from tests.config.values import smallest

pytestmark = pytest.mark.usefixtures("warm_ranks")

ROOMY = Machine("CPU", "cpu", {}, None, memory=16e9)


def layout(machine: Machine = ROOMY, **sections: dict) -> tuple[str, bool]:
    model = {"config_path": "builtin:tiny-qwen3"}
    sections.setdefault("launch", {"nproc_per_node": 1})
    data = {"sample_packing_sequence_len": 1024}
    run, note = with_one_process_layout(
        loads(smallest(model=model, data=data, **sections)), machine
    )
    found = run.train.data_parallel_mode, run.train.enable_gradient_checkpointing
    assert (note is None) == (found == ("fsdp2", True))
    return found


def test_nothing_is_sharded_or_recomputed_in_one_process_with_room():
    assert layout() == ("none", False)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"launch": {"nproc_per_node": 2}}, ("fsdp2", True)),
        ({"train": {"data_parallel_mode": "fsdp2"}}, ("fsdp2", False)),
        ({"train": {"enable_gradient_checkpointing": True}}, ("none", True)),
        ({"train": {"zero_stage": 2}}, ("fsdp2", False)),
        ({"train": {"recompute_modules": ["mlp"]}}, ("none", True)),
        ({"train": {"enable_reentrant": True}}, ("none", True)),
        (
            {"train": {"data_parallel_mode": "fsdp2", "enable_gradient_checkpointing": True}},
            ("fsdp2", True),
        ),
    ],
)
def test_written_settings_and_those_that_need_them_are_left_alone(sections, expected):
    assert layout(**sections) == expected


def test_memory_is_saved_where_there_is_little_or_it_is_unknown():
    assert layout(replace(ROOMY, memory=1e6)) == ("fsdp2", True)
    assert layout(replace(ROOMY, memory=None)) == ("fsdp2", True)
    assert layout(replace(ROOMY, kind="cuda", memory=80e9)) == ("fsdp2", True)


@pytest.mark.slow
def test_a_run_that_writes_neither_trains_as_one_that_shards_and_recomputes(tmp_path: Path):
    written = {"data_parallel_mode": "fsdp2", "enable_gradient_checkpointing": True}
    found = {}
    for name, settings in {"written": written, "unwritten": {}}.items():
        folder = tmp_path / name
        folder.mkdir()
        config = small_run(folder)
        sections = yaml.safe_load(config.read_text())
        sections["train"] = {"output_dir": str(folder / "out"), **settings}
        sections["launch"] = {"nproc_per_node": 1}
        config.write_text(yaml.safe_dump(sections))
        said = penstock("train", config)
        assert said.code == 0, said.err
        assert ("train: data_parallel_mode: none" in said.err) == (not settings)
        lines = (folder / "out/metrics.jsonl").read_text().splitlines()
        found[name] = [record["loss"] for line in lines if "loss" in (record := json.loads(line))]
    assert found["unwritten"] == pytest.approx(found["written"], rel=1e-3)
