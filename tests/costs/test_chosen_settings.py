"""Settings that a config leaves open: the fastest whose estimate fits."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.config.loading.load import loads
from penstock.config.schema.run import RunConfig
from penstock.engine.distributed.parallel_dims import build_parallel_dims
from penstock.estimate.costs.chosen_settings import (
    NOTHING,
    PARTS,
    ROOM,
    WHOLE_LAYERS,
    ChosenSettings,
    choose_settings,
)
from penstock.estimate.costs.device_speed import Machine, find_machine
from penstock.estimate.costs.estimate import Prediction, build_cost_model, predict
from penstock.train.launch.leaner_starts import Settings, describe_settings
from tests.cli.command import penstock, small_run
from tests.config.values import smallest
from tests.dryrun.layouts import DENSE, LINEAR, MOE
from tests.engine.runs import write_config

ROOMY = Machine("CPU", "cpu", {}, None, memory=16e9)
H100 = find_machine("H100")

LEVELS = (NOTHING, *PARTS.values(), WHOLE_LAYERS)
FULL_LAYOUT = ("fsdp2", True)


def layout(machine: Machine = ROOMY, **sections: dict) -> tuple[str, bool]:
    model = {"config_path": "builtin:tiny-qwen3"}
    sections.setdefault("launch", {"nproc_per_node": 1})
    data = {"sample_packing_sequence_len": 1024}
    chosen = choose_settings(loads(smallest(model=model, data=data, **sections)), machine)
    train = chosen.run.train
    return train.data_parallel_mode, train.enable_gradient_checkpointing


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, ("none", False)),
        ({"launch": {"nproc_per_node": 2}}, ("fsdp2", False)),
        ({"train": {"data_parallel_mode": "fsdp2"}}, ("fsdp2", False)),
        ({"train": {"enable_gradient_checkpointing": True}}, ("none", True)),
        ({"train": {"zero_stage": 2}}, ("fsdp2", False)),
        ({"train": {"recompute_modules": ["mlp"]}}, ("none", True)),
        ({"train": {"enable_reentrant": True}}, ("none", True)),
        ({"model": {"attn_implementation": "eager"}}, FULL_LAYOUT),
        (
            {"train": {"data_parallel_mode": "fsdp2", "enable_gradient_checkpointing": True}},
            FULL_LAYOUT,
        ),
    ],
)
def test_written_settings_and_those_that_need_them_are_left_alone(sections, expected):
    model = {"config_path": "builtin:tiny-qwen3", **sections.pop("model", {})}
    sections.setdefault("launch", {"nproc_per_node": 1})
    data = {"sample_packing_sequence_len": 1024}
    train = choose_settings(loads(smallest(model=model, data=data, **sections)), ROOMY).run.train
    assert (train.data_parallel_mode, train.enable_gradient_checkpointing) == expected


def test_memory_is_saved_where_there_is_little_or_it_is_unknown():
    assert layout(replace(ROOMY, memory=1e6)) == FULL_LAYOUT
    assert layout(replace(ROOMY, memory=None)) == FULL_LAYOUT
    assert layout(replace(ROOMY, kind="cuda", memory=1e6)) == FULL_LAYOUT
    assert layout(replace(ROOMY, kind="cuda", memory=80e9)) == ("fsdp2", False)


def gpu_run(folder: Path, shape: dict[str, Any], world: int, **train: Any) -> RunConfig:
    """A run on GPUs with rows of 8192."""
    return loads(
        smallest(
            model={"config_path": str(write_config(folder, **shape))},
            data={"sample_packing_sequence_len": 8192},
            launch={"nproc_per_node": world},
            train=train,
        )
    )


def prediction(run: RunConfig, world: int, shape: dict[str, Any]) -> Prediction:
    """What `penstock plan` says of the run on H100s."""
    model = build_cost_model(run, shape)
    return predict(run, model, build_parallel_dims(run.train, world), H100, None)


def hf_config(run: RunConfig) -> dict[str, Any]:
    assert run.model.config_path
    return json.loads((Path(run.model.config_path) / "config.json").read_text())


MODELS = {"dense": (DENSE, 8), "experts": (MOE, 1)}


@pytest.mark.parametrize("level", LEVELS, ids=describe_settings)
@pytest.mark.parametrize("name", MODELS)
def test_the_fastest_recomputation_that_fits_is_chosen(name, level, tmp_path):
    shape, world = MODELS[name]
    run = gpu_run(tmp_path, shape, world)

    def predicted(settings: Settings) -> tuple[float, float]:
        found = prediction(run.with_fields("train", **settings), world, hf_config(run))
        assert found.step
        return found.step.total, found.memory.total

    costs = [(*predicted(settings), settings) for settings in LEVELS]
    [level_needs] = [needed for _, needed, settings in costs if settings == level]
    # Just enough for this one; nothing is enough for whole layers, which are the last resort.
    memory = level_needs / ROOM["cuda"] * (0.5 if level == WHOLE_LAYERS else 1.001)
    chosen = choose_settings(run, replace(H100, memory=memory))
    fitting = [cost for cost in costs if cost[1] <= ROOM["cuda"] * memory]
    _, needed, fastest = min(fitting, key=lambda cost: cost[0], default=costs[-1])
    for field, value in fastest.items():
        assert getattr(chosen.run.train, field) == value
    assert chosen.note
    # What is left needs less memory each time, and ends with whole layers.
    left = [predicted(settings)[1] for settings in chosen.leaner]
    assert [needed, *left] == sorted([needed, *left], reverse=True)
    assert [fastest, *chosen.leaner][-1] == WHOLE_LAYERS


def test_layers_whose_parts_are_not_estimated_are_recomputed_whole_or_not(tmp_path):
    run = gpu_run(tmp_path, LINEAR, 1)
    assert choose_settings(run, replace(H100, memory=1e15)).leaner == (WHOLE_LAYERS,)


def test_experts_may_get_more_tokens_than_the_mean(tmp_path):
    run = gpu_run(tmp_path, MOE, 8, expert_parallel_size=8)
    memory = prediction(run.with_fields("train", **NOTHING), 8, hf_config(run)).memory.total
    chosen = choose_settings(run, replace(H100, memory=memory / ROOM["cuda"] * 1.001))
    assert chosen.run.train.enable_gradient_checkpointing


def auto(folder: Path, memory: float, world: int = 2, **train: Any) -> tuple[RunConfig, Any]:
    settings = {"micro_batch_size": "auto", "global_batch_size": 24, **train}
    run = gpu_run(folder, DENSE, world, **settings)
    return run, choose_settings(run, replace(H100, memory=memory))


@pytest.mark.parametrize("memory", [10e9, 20e9, 40e9, 80e9, 141e9])
@pytest.mark.parametrize("recomputes", [False, True])
def test_auto_is_the_most_rows_that_fit_and_divide_the_step(memory, recomputes, tmp_path):
    world, sizes = 2, (12, 6, 4, 3, 2, 1)
    run, chosen = auto(tmp_path, memory, world, enable_gradient_checkpointing=recomputes)
    fitting = [
        size
        for size in sizes
        if prediction(
            run.with_fields("train", micro_batch_size=size), world, hf_config(run)
        ).memory.total
        <= ROOM["cuda"] * memory
    ]
    size = chosen.run.train.micro_batch_size
    assert size == (fitting[0] if fitting else 1)
    assert chosen.run.train.global_batch_size == 24
    assert chosen.run.train.enable_gradient_checkpointing == recomputes
    assert f"micro_batch_size: {size}" in chosen.note
    # Halved where memory runs out, until one row is left.
    halves = [settings["micro_batch_size"] for settings in chosen.leaner]
    assert halves == {12: [6, 3, 1], 6: [3, 1], 4: [2, 1], 3: [1], 2: [1], 1: []}[size]


def test_auto_stores_what_it_can_before_it_takes_more_rows_and_gives_rows_up_first(tmp_path):
    _, chosen = auto(tmp_path, 1e12)
    assert chosen.run.train.micro_batch_size == 12
    assert not chosen.run.train.enable_gradient_checkpointing
    *halves, whole = chosen.leaner
    assert [settings["micro_batch_size"] for settings in halves[:3]] == [6, 3, 1]
    assert whole == {**WHOLE_LAYERS, "micro_batch_size": 1}


def test_auto_is_one_row_of_what_is_not_estimated(tmp_path):
    run, _ = auto(tmp_path, 80e9)
    chosen = choose_settings(run.with_fields("model", attn_implementation="eager"), H100)
    assert chosen == ChosenSettings(run=chosen.run, note=chosen.note)
    assert chosen.run.train.micro_batch_size == 1
    assert chosen.note
    assert "is not known" in chosen.note


@pytest.mark.slow
@pytest.mark.usefixtures("warm_ranks")
def test_a_run_that_writes_neither_trains_as_one_that_shards_and_recomputes(tmp_path: Path):
    batch = {"global_batch_size": 4}
    cases = {
        "written": {"data_parallel_mode": "fsdp2", "enable_gradient_checkpointing": True},
        "unwritten": {},
        "auto": {"micro_batch_size": "auto"},
    }
    found, keys = {}, set()
    for name, settings in cases.items():
        folder = tmp_path / name
        folder.mkdir()
        config = small_run(folder)
        sections = yaml.safe_load(config.read_text())
        sections["train"] = {"output_dir": str(folder / "out"), **batch, **settings}
        sections["data"]["dataset_prepared_path"] = str(tmp_path / "data")
        sections["data"]["datasets"][0]["path"] = str(tmp_path / "written" / "rows.jsonl")
        sections["launch"] = {"nproc_per_node": 1}
        config.write_text(yaml.safe_dump(sections))
        said = penstock("train", config)
        assert said.code == 0, said.err
        assert ("train: data_parallel_mode: none" in said.err) == (name != "written")
        assert ("micro_batch_size: 4" in said.err) == (name == "auto")
        lines = (folder / "out/metrics.jsonl").read_text().splitlines()
        found[name] = [record["loss"] for line in lines if "loss" in (record := json.loads(line))]
        keys.add(json.loads((folder / "out/job.json").read_text())["key"])
    assert found["unwritten"] == pytest.approx(found["written"], rel=1e-3)
    assert found["auto"] == pytest.approx(found["written"], rel=1e-3)
    assert len(keys) == 1
