"""Layouts that cannot be are refused before anything starts, with one that can."""

import re
from copy import deepcopy
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.loading.load import load, loads
from penstock.core import env
from penstock.core.errors import CapabilityError, ConfigError
from penstock.engine.distributed.parallel_dims import (
    AXIS_FIELDS,
    build_parallel_dims,
    reshard_policy,
)
from penstock.engine.distributed.validate_layout import (
    ModelDims,
    layout_errors,
    micro_batch_padding,
)
from penstock.estimate import machine
from penstock.estimate.machine import check_machine, world_size
from tests.config.values import smallest
from tests.conftest import ROOT
from tests.engine.runs import write_config

MODEL = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 6}


@pytest.fixture(autouse=True)
def _no_gpus(monkeypatch):
    """The number of processes is what a test writes, whatever this machine has."""
    monkeypatch.setattr(env, "num_gpus", lambda: 0)


def values_of(nproc: int, *, data: dict | None = None, lora: dict | None = None, **train: Any):
    sections = {"data": data or {}, "lora": lora or {}, "train": train}
    launch = {"nproc_per_node": nproc}
    return smallest(model={"foundation": MODEL}, launch=launch, **sections)


def refusal(values: dict[str, Any]) -> str | None:
    """What the run is refused with before it starts."""
    try:
        check_machine(loads(values))
    except ConfigError as error:
        return str(error)
    return None


def proposals(text: str) -> list[dict[str, Any]]:
    """What the text says to write: each alternative as values by setting."""
    at = re.search(r"^([a-z_]+)\.[a-z_]+: ", text)
    section = f"{at[1]}." if at else ""
    found = []
    for line in re.findall(r"[Ww]rite (.*)", text):
        for alternative in line.split(", or "):
            pairs = re.findall(r"([a-z][a-z_.]+): ([^ ,]+?)(?=\.?$| and |, | or )", alternative)
            if pairs:
                named = {n if "." in n else section + n: yaml.safe_load(v) for n, v in pairs}
                found.append(named)
    return found


def changed(values: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    result = deepcopy(values)
    for name, value in change.items():
        section, _, field = name.partition(".")
        result.setdefault(section, {})[field] = value
    return result


SPARSE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
PIPE: dict[str, Any] = {"pipeline_parallel_size": 2, "gradient_accumulation_steps": 4}

# Processes, settings, the setting that is named, words of the reason, and the first thing to write.
WRONG: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "world is no multiple": (
        values_of(6, tensor_parallel_size=4),
        "train.tensor_parallel_size 4",
        "6 is no multiple of 4",
        "tensor_parallel_size: 2",
    ),
    "too few processes": (
        values_of(1, tensor_parallel_size=2),
        "train.tensor_parallel_size 2",
        "1 is no multiple of 2",
        "tensor_parallel_size: 1",
    ),
    "heads": (
        values_of(6, tensor_parallel_size=3),
        "train.tensor_parallel_size is 3",
        "num_attention_heads is 8",
        "tensor_parallel_size: 2",
    ),
    "more ranks than heads": (
        values_of(16, tensor_parallel_size=16),
        "train.tensor_parallel_size is 16",
        "num_attention_heads is 8",
        "tensor_parallel_size: 8",
    ),
    "key heads": (
        changed(
            values_of(6, tensor_parallel_size=6),
            {"model.foundation": {**MODEL, "num_attention_heads": 12}},
        ),
        "train.tensor_parallel_size is 6",
        "num_key_value_heads is 4",
        "tensor_parallel_size: 2",
    ),
    "features": (
        changed(
            values_of(8, tensor_parallel_size=8),
            {"model.foundation": {**MODEL, "intermediate_size": 7}},
        ),
        "train.tensor_parallel_size is 8",
        "intermediate_size is 7: some rank would get nothing",
        "tensor_parallel_size: 4",
    ),
    "experts of a dense model": (
        values_of(4, expert_parallel_size=2),
        "train.expert_parallel_size is 2",
        "the model has no experts",
        "expert_parallel_size: 1",
    ),
    "experts": (
        changed(values_of(8, expert_parallel_size=8), {"model.foundation": {**MODEL, **SPARSE}}),
        "train.expert_parallel_size is 8",
        "a layer has 4 experts",
        "expert_parallel_size: 4",
    ),
    "experts over processes": (
        changed(values_of(6, expert_parallel_size=4), {"model.foundation": {**MODEL, **SPARSE}}),
        "train.expert_parallel_size is 4",
        "there are 6 processes",
        "expert_parallel_size: 2",
    ),
    "heads of ulysses": (
        values_of(8, tensor_parallel_size=4, ulysses_parallel_size=4, data_parallel_mode="none"),
        "train.ulysses_parallel_size is 4",
        "a rank has 2 of the 8 num_attention_heads",
        "ulysses_parallel_size: 2",
    ),
    "layers": (
        values_of(16, pipeline_parallel_size=16, gradient_accumulation_steps=16),
        "train.pipeline_parallel_size 16",
        "would hold no layer",
        "pipeline_parallel_size: 8",
    ),
    "split": (
        values_of(2, **PIPE, pipeline_parallel_split=[0, 2, 4]),
        "train.pipeline_parallel_split [0, 2, 4]",
        "each of 2 stages",
        "pipeline_parallel_split: uniform",
    ),
    "stages on a rank": (
        values_of(2, **PIPE, pipeline_parallel_virtual_stages=2),
        "train.pipeline_parallel_virtual_stages is 2",
        "one stage on each rank",
        "pipeline_parallel_virtual_stages: 1",
    ),
    "too few micro-batches": (
        values_of(4, pipeline_parallel_size=4, gradient_accumulation_steps=2),
        "train.pipeline_parallel_schedule is 1F1B",
        "a step has 2 micro-batches",
        "gradient_accumulation_steps: 4",
    ),
    "too few micro-batches of a global batch": (
        values_of(4, pipeline_parallel_size=4, global_batch_size=8, micro_batch_size=4),
        "train.pipeline_parallel_schedule is 1F1B",
        "global_batch_size 8",
        "micro_batch_size: 2",
    ),
    "micro-batches in no rounds": (
        values_of(
            2,
            pipeline_parallel_size=2,
            pipeline_parallel_schedule="Interleaved1F1B",
            gradient_accumulation_steps=5,
        ),
        "train.pipeline_parallel_schedule is Interleaved1F1B",
        "5 micro-batches",
        "gradient_accumulation_steps: 6",
    ),
    "freed weights of a split backward pass": (
        values_of(
            2,
            **PIPE,
            pipeline_parallel_schedule="ZBVZeroBubble",
            reshard_after_forward=True,
        ),
        "train.reshard_after_forward",
        "weights that true has freed",
        "reshard_after_forward: false",
    ),
    "shards": (
        values_of(8, data_parallel_shard_size=3),
        "train.data_parallel_shard_size is 3",
        "8 processes are to be shared out",
        "data_parallel_shard_size: 8",
    ),
    "shards without copies": (
        values_of(8, data_parallel_shard_size=2),
        "train.data_parallel_shard_size is 2",
        "8 processes are to be shared out",
        "data_parallel_replicate_size: 4",
    ),
    "shards and copies": (
        values_of(8, data_parallel_shard_size=2, data_parallel_replicate_size=2),
        "train.data_parallel_replicate_size is 2 and train.data_parallel_shard_size is 2",
        "8 processes are to be shared out",
        "data_parallel_replicate_size: 4",
    ),
    "none on several": (
        values_of(8, data_parallel_mode="none", tensor_parallel_size=2),
        "train.data_parallel_mode is none",
        "4 processes (8, divided by 2 for the other axes)",
        "data_parallel_mode: fsdp2",
    ),
    "none with copies": (
        values_of(2, data_parallel_mode="none", data_parallel_replicate_size=2),
        "train.data_parallel_replicate_size is 2",
        "one copy",
        "data_parallel_mode: fsdp2",
    ),
    "ddp with shards": (
        values_of(4, data_parallel_mode="ddp", data_parallel_shard_size=2),
        "train.data_parallel_shard_size is 2",
        "ddp shards nothing",
        "data_parallel_shard_size: 1",
    ),
    "sequence parallel alone": (
        values_of(4, sequence_parallel=True),
        "train.sequence_parallel",
        "tensor_parallel_size, which is 1",
        "tensor_parallel_size: 2",
    ),
    "padding": (
        values_of(
            4,
            ringattn_parallel_size=2,
            ulysses_parallel_size=2,
            data={"pad_to_multiple_of": 100, "sample_packing_sequence_len": 1000},
        ),
        "data.pad_to_multiple_of is 100",
        "8 equal pieces (2 x ringattn_parallel_size 2 x ulysses_parallel_size 2)",
        "pad_to_multiple_of: 200",
    ),
    "stage 3 that keeps": (
        values_of(2, zero_stage=3, reshard_after_forward=False),
        "train.zero_stage",
        "reshard_after_forward is false",
        "zero_stage: 2",
    ),
    "stage of nothing sharded": (
        values_of(2, data_parallel_mode="ddp", zero_stage=1),
        "train.zero_stage",
        "does not shard weights",
        "data_parallel_mode: fsdp2",
    ),
    "global batch": (
        values_of(3, global_batch_size=8),
        "train.global_batch_size is 8",
        "3 replicas",
        "global_batch_size: 9",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_layout_is_refused_before_launch_with_one_that_is_accepted(case: str) -> None:
    values, named, reason, first = WRONG[case]
    text = refusal(values)
    assert text is not None
    assert named in text
    assert reason in text
    proposed = proposals(text)
    assert proposed, text
    [(name, value)] = proposed[0].items()
    assert f"{name.partition('.')[2]}: {value}".lower() == first.lower()
    for change in proposed:
        assert refusal(changed(values, change)) is None, change


SIZE = st.sampled_from([1, 1, 2, 3, 4, 6])


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    world=st.integers(1, 16),
    mode=st.sampled_from(["none", "ddp", "fsdp2"]),
    sizes=st.fixed_dictionaries(
        {
            "data_parallel_shard_size": st.sampled_from([-1, 1, 2, 4]),
            "data_parallel_replicate_size": st.sampled_from([-1, 1, 2]),
            "tensor_parallel_size": SIZE,
            "pipeline_parallel_size": SIZE,
            "ringattn_parallel_size": SIZE,
            "ulysses_parallel_size": SIZE,
        }
    ),
    rows=st.sampled_from([None, 8, 12]),
)
def test_a_layout_uses_every_process_or_another_is_proposed(world, mode, sizes, rows) -> None:
    values = values_of(world, data_parallel_mode=mode, global_batch_size=rows, **sizes)
    text = refusal(values)
    if text is None:
        run = loads(values)
        degrees = build_parallel_dims(run.train, world_size(run))
        assert degrees.world_size == world
        for axis, setting in AXIS_FIELDS.items():
            assert sizes[setting] in (-1, getattr(degrees, axis))
        return
    for change in proposals(text):
        assert refusal(changed(values, change)) is None, text


@pytest.mark.parametrize(
    ("settings", "until"),
    [
        ({}, "nothing"),
        ({"zero_stage": 1}, "step"),
        ({"zero_stage": 2}, "backward"),
        ({"zero_stage": 3}, "nothing"),
        ({"enable_full_shard": False}, "backward"),
        ({"reshard_after_forward": False}, "backward"),
        ({"reshard_after_forward": False, "zero_stage": 1}, "step"),
        ({"enable_full_shard": False, "zero_stage": 2}, "backward"),
        (PIPE, "backward"),
        ({**PIPE, "reshard_after_forward": True}, "nothing"),
        ({**PIPE, "zero_stage": 3}, "nothing"),
    ],
)
def test_gathered_weights_are_kept_as_long_as_the_settings_say(settings, until) -> None:
    assert reshard_policy(loads(smallest(train=settings)).train) == until


@pytest.mark.parametrize(
    ("train", "padding"),
    [
        ({}, 128),
        ({"ringattn_parallel_size": 4, "ulysses_parallel_size": 2}, 128),
        ({"ringattn_parallel_size": 3}, 384),
        ({"ulysses_parallel_size": 3, "tensor_parallel_size": 2, "sequence_parallel": True}, 384),
    ],
)
def test_unwritten_padding_is_rounded_up_to_what_a_layout_cuts_rows_into(train, padding) -> None:
    run = loads(smallest(train=train))
    assert micro_batch_padding(run.data, run.train) == padding


def test_a_layout_without_a_rank_is_told_with_sizes_alone() -> None:
    train = loads(smallest(train={"tensor_parallel_size": 4})).train
    with pytest.raises(ConfigError, match=r"6 is no multiple of 4\.\n  Write .*: 3\.$"):
        build_parallel_dims(train, 6)


PUBLISHED = {
    # Qwen3-32B and Qwen3-14B: what their config.json says.
    "tensor": ModelDims(64, 8, 64, 25600, 151936),
    "pipeline": ModelDims(40, 8, 40, 17408, 151936),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_layouts_of_the_recipes_fit_their_models(name: str) -> None:
    run = load(ROOT / "configs" / "examples" / f"{name}.yaml")
    assert layout_errors(run, world_size(run), PUBLISHED[name]) == []
    assert layout_errors(run, 6, PUBLISHED[name])


def test_the_numbers_are_those_of_the_models_own_config(tmp_path) -> None:
    write_config(tmp_path / "model", num_attention_heads=6, num_key_value_heads=6)
    values = changed(
        values_of(4, tensor_parallel_size=4),
        {"model.config_path": str(tmp_path / "model"), "model.foundation": {}},
    )
    text = refusal(values)
    assert text is not None
    assert "num_attention_heads is 6" in text
    assert refusal(changed(values, {"model.foundation": {"num_attention_heads": 12}})) is not None
    more = {"num_attention_heads": 8, "num_key_value_heads": 4}
    assert refusal(changed(values, {"model.foundation": more})) is None


@pytest.mark.parametrize("installed", ["2.11.0+cu130", "2.12.0"])
def test_a_backward_pass_in_halves_is_refused_where_pytorch_cannot_run_it(installed, monkeypatch):
    monkeypatch.setattr(machine, "version", lambda _: installed)
    split = {"pipeline_parallel_size": 2, "pipeline_parallel_schedule": "InterleavedZeroBubble"}
    train = loads(values_of(2, **split, gradient_accumulation_steps=4)).train
    if installed == "2.12.0":
        machine.check_schedule(train)
        return
    with pytest.raises(CapabilityError, match=r"InterleavedZeroBubble, which needs PyTorch 2\.12"):
        machine.check_schedule(train)
    machine.check_schedule(train.model_copy(update={"pipeline_parallel_schedule": "1F1B"}))
