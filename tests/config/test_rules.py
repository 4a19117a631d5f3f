"""Combinations that cannot be honoured are refused with the reason and the way out."""

from typing import Any

import pytest

from penstock.config.load import loads
from penstock.config.rules import kind_of
from penstock.core.errors import ConfigError
from tests.config.values import faults_of, smallest


def dataset(**fields: Any) -> dict[str, Any]:
    return {"datasets": [{"path": "folder", **fields}]}


ROW = "sample_packing_sequence_len"

# The settings, where the fault is told, words of the reason, and the change that mends it.
COMBINATIONS: list[tuple[dict[str, Any], str, str, dict[str, Any]]] = [
    (
        {"model": {"config_path": None}},
        "model.model_path",
        "no model is named",
        {"model": {"model_path": "x"}},
    ),
    (
        {"data": dataset(data_files="data/*")},
        "data.datasets.0.data_files",
        "write ds_type: json, csv",
        {"data": dataset(data_files="data/*", ds_type="csv")},
    ),
    (
        {"data": dataset(data_files=["a.csv", "b.jsonl"])},
        "data.datasets.0.data_files",
        "do not tell one format",
        {"data": dataset(data_files=["a.json", "b.jsonl.gz"])},
    ),
    (
        {"data": dataset(data_files=[])},
        "data.datasets.0.data_files",
        "is empty",
        {"data": dataset(data_files=None)},
    ),
    (
        {"data": {**dataset(max_seq_len=300), ROW: 256}},
        "data.datasets.0.max_seq_len",
        "300 tokens does not fit a row of 256",
        {"data": {**dataset(max_seq_len=300), ROW: 512}},
    ),
    (
        {"data": {ROW: 1000, "pad_to_multiple_of": 128}},
        "data.pad_to_multiple_of",
        "write sample_packing_sequence_len: 896 or 1024",
        {"data": {ROW: 1024}},
    ),
    (
        {"data": {"val_set_size": 5, "test_datasets": [{"path": "x"}]}},
        "data.val_set_size",
        "leave one of the two out",
        {"data": {"val_set_size": None}},
    ),
    (
        {"data": {"datasets": []}},
        "data.datasets",
        "is empty; write at least one",
        {"data": dataset()},
    ),
    (
        {"train": {"global_batch_size": 9, "micro_batch_size": 2}},
        "train.global_batch_size",
        "write a multiple of 2",
        {"train": {"global_batch_size": 8}},
    ),
    (
        {
            "train": {
                "global_batch_size": 8,
                "micro_batch_size": 2,
                "gradient_accumulation_steps": 3,
            }
        },
        "train.global_batch_size",
        "write a multiple of 6",
        {"train": {"gradient_accumulation_steps": 4}},
    ),
    (
        {"train": {"init_device": "cpu"}},
        "train.init_device",
        "write init_device: meta",
        {"train": {"data_parallel_mode": "ddp"}},
    ),
    (
        {"train": {"lr_decay_style": "linear", "lr": 1e-8}},
        "train.lr_min",
        "an lr_min of at most 1e-08",
        {"train": {"lr_min": 0}},
    ),
    (
        {"train": {"lr_decay_style": "cosine", "lr_warmup_ratio": 0.5, "lr_decay_ratio": 0.4}},
        "train.lr_warmup_ratio",
        "after the decay's end",
        {"train": {"lr_decay_ratio": 0.5}},
    ),
    (
        {"train": {"recompute_modules": ["mlp"], "enable_gradient_checkpointing": False}},
        "train.recompute_modules",
        "nothing is recomputed",
        {"train": {"recompute_modules": None}},
    ),
    (
        {"lora": {"save_lora_only": True}},
        "lora.save_lora_only",
        "write enable_lora: true",
        {"lora": {"enable_lora": True}},
    ),
    (
        {"pipeline": {"stages": ["pack", "prepare"]}},
        "pipeline.stages",
        "write [prepare, pack]",
        {"pipeline": {"stages": ["prepare", "pack"]}},
    ),
    (
        {"pipeline": {"stages": ["prepare", "train"]}},
        "pipeline.stages",
        "train needs pack, which is left out; write [prepare, pack, train]",
        {"pipeline": {"stages": ["train"]}},
    ),
    (
        {"pipeline": {"stages": ["pack", "pack"]}},
        "pipeline.stages",
        "pack is listed more than once",
        {"pipeline": {"stages": ["pack"]}},
    ),
    (
        {"pipeline": {"stages": ["export", "push"]}},
        "pipeline.stages",
        "write push.repo_id",
        {"push": {"url": "file:///x"}},
    ),
    (
        {"push": {"url": "s3://b/x", "repo_id": "a/b"}},
        "push.url",
        "a push has one target",
        {"push": {"url": None}},
    ),
    (
        {"push": {"url": "s3://b/x", "create_pr": True}},
        "push.create_pr",
        "only a hub repository",
        {"push": {"create_pr": False}},
    ),
    (
        {"launch": {"nnodes": 2}},
        "launch.rdzv_endpoint",
        "need a place to meet",
        {"launch": {"rdzv_endpoint": "a:1"}},
    ),
    (
        {"launch": {"node_rank": 1}},
        "launch.node_rank",
        "write at most 0",
        {"launch": {"node_rank": 0}},
    ),
]


@pytest.mark.parametrize(("sections", "where", "reason", "mended"), COMBINATIONS)
def test_impossible_combination_is_refused_and_mended_by_what_is_proposed(
    sections: dict[str, Any], where: str, reason: str, mended: dict[str, Any]
) -> None:
    told = faults_of(**sections)
    assert len(told) == 1
    assert told[0].startswith(f"{where}: ")
    assert reason in told[0]
    values = smallest(**sections)
    for section, fields in mended.items():
        values.setdefault(section, {}).update(fields)
    loads(values)


def test_unwritten_padding_may_be_any() -> None:
    assert loads(smallest(data={ROW: 1000})).data.pad_to_multiple_of == 128


def test_constant_rate_needs_no_smaller_minimum() -> None:
    assert loads(smallest(train={"lr": 1e-9})).train.lr == 1e-9


def test_combinations_are_told_beside_faults_of_single_values() -> None:
    told = faults_of(
        train={"sed": 1, "init_device": "cpu", "lr": "fast", "lr_decay_style": "linear"},
        lora={"save_lora_only": True},
    )
    assert [line.split(": ")[0] for line in told] == [
        "train.lr",
        "train.sed",
        "train.init_device",
        "lora.save_lora_only",
    ]


def test_combination_with_a_faulty_value_is_not_told() -> None:
    told = faults_of(train={"data_parallel_mode": "fsdp3", "init_device": "cpu"})
    assert len(told) == 1
    assert told[0].startswith("train.data_parallel_mode: is the text fsdp3")


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"RANK": "0"}, "set for each process by the launcher"),
        ({"1A": "x"}, "no name of an environment variable"),
        ({"WANDB_API_KEY": "x"}, "looks like a secret"),
    ],
)
def test_environment_for_the_ranks_is_checked(env: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        loads(smallest(launch={"env": env}))
    assert loads(smallest(launch={"env": {"TOKENIZERS_PARALLELISM": "false"}})).launch.env


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a/b.JSONL", "json"),
        ("x.csv.gz", "csv"),
        ("*.parquet", "parquet"),
        ("x.txt", "text"),
        ("data.d/x", None),
        ("x.gz", None),
    ],
)
def test_extension_tells_the_format(name: str, kind: str | None) -> None:
    assert kind_of(name) == kind
