"""Combinations that cannot be honoured are refused with the reason and the way out."""

from typing import Any

import pytest

from penstock.config.loading.load import loads
from penstock.core.errors import ConfigError
from penstock.core.sources.local_files import detect_file_kind
from tests.config.values import faults_of, refused_and_mended, smallest


def dataset(**fields: Any) -> dict[str, Any]:
    return {"datasets": [{"path": "folder", **fields}]}


ROW = "sample_packing_sequence_len"
COMPARED = {"train": {"objective": "preference"}}

# The settings, where the fault is told, words of the reason, and the change that mends it.
COMBINATIONS: list[tuple[dict[str, Any], str, str, dict[str, Any]]] = [
    (
        {"model": {"config_path": None}},
        "model.model_path",
        "is not set",
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
        "the names in data_files do not have one known extension",
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
        "a sample of 300 tokens does not fit a packed sequence of",
        {"data": {**dataset(max_seq_len=300), ROW: 512}},
    ),
    (
        {"data": {ROW: 1000, "pad_to_multiple_of": 64}},
        "data.pad_to_multiple_of",
        "write sample_packing_sequence_len: 960 or 1024",
        {"data": {ROW: 1024}},
    ),
    *(
        (
            {"train": {"dropout": {name: value}}},
            f"train.dropout.{name}",
            "there is no dropout; write hidden, attention or ffn",
            {"train": {"dropout": {name: value, "hidden": 0.1}}},
        )
        for name, value in {"warmup_steps": 5, "depth_scaling": True}.items()
    ),
    *(
        (
            {"data": {**dataset(type="chat", train_on_eos=ends), "mask_eos_in_loss": True}},
            "data.datasets.0.train_on_eos",
            f"is {ends}, and data.mask_eos_in_loss: true trains none of these tokens; leave one of",
            {"data": {**dataset(type="chat", train_on_eos="none"), "mask_eos_in_loss": True}},
        )
        for ends in ("all", "last")
    ),
    *(
        (
            {"data": dataset(type=kind, **{name: value}), **objective},
            f"data.datasets.0.{name}",
            f"{kind} samples are no conversations with turns to choose from",
            {"data": dataset(type=kind)},
        )
        for kind, objective in (("text", {}), ("tokenized", {}), ("preference", COMPARED))
        for name, value in (("roles_to_train", ["user"]), ("train_on_eos", "all"))
    ),
    (
        {"data": {"val_set_size": 5, "test_datasets": [{"path": "x"}]}},
        "data.val_set_size",
        "leave one of the two out",
        {"data": {"val_set_size": None}},
    ),
    (
        {"data": {**dataset(type="preference"), "isolate_samples": False}, **COMPARED},
        "data.isolate_samples",
        "completions of preference samples must not attend to",
        {"data": {"isolate_samples": True}},
    ),
    (
        {"data": {"datasets": []}},
        "data.datasets",
        "is empty; write at least one",
        {"data": dataset()},
    ),
    (
        {"data": {"dataloader_num_workers": 0, "dataloader_prefetch_factor": 4}},
        "data.dataloader_prefetch_factor",
        "no worker can load 4 steps ahead with",
        {"data": {"dataloader_num_workers": 1}},
    ),
    (
        {"data": dataset(shards_idx=0)},
        "data.datasets.0.shards_idx",
        "there is only one shard without shards",
        {"data": dataset(shards=2, shards_idx=0)},
    ),
    (
        {"data": dataset(shards=2, shards_idx=2)},
        "data.datasets.0.shards_idx",
        "2 is not an index of 2 shards",
        {"data": dataset(shards=2, shards_idx=1)},
    ),
    (
        {"data": dataset(shards=2, preprocess_shards=2)},
        "data.datasets.0.preprocess_shards",
        "leave one of the two out",
        {"data": dataset(preprocess_shards=2)},
    ),
    (
        {"data": {"dataset_shard_num": 3}},
        "data.dataset_shard_num",
        "write dataset_shard_idx: 0 to 2",
        {"data": {"dataset_shard_idx": 2}},
    ),
    (
        {"data": {"dataset_shard_idx": 0}},
        "data.dataset_shard_idx",
        "write dataset_shard_num too",
        {"data": {"dataset_shard_num": 1}},
    ),
    (
        {"data": {"dataset_shard_num": 3, "dataset_shard_idx": 3}},
        "data.dataset_shard_idx",
        "3 is not an index of 3 shards",
        {"data": {"dataset_shard_num": 4}},
    ),
    (
        {"data": dataset(weight=2)},
        "data.datasets.0.weight",
        "mix_strategy: concat uses every sample once and ignores",
        {"data": {"mix_strategy": "random"}},
    ),
    (
        {"data": dataset(weight=0)},
        "data.datasets",
        "all weights are 0",
        {"data": {"datasets": [{"path": "a", "weight": 0}, {"path": "b"}]}},
    ),
    (
        {"data": {"test_datasets": [{"path": "x", "weight": 2}]}},
        "data.test_datasets.0.weight",
        "test_datasets are not mixed",
        {"data": {"test_datasets": [{"path": "x", "max_samples": 2}]}},
    ),
    (
        {"data": {"decontaminate_datasets": [{"path": "x", "max_samples": 2}]}},
        "data.decontaminate_datasets.0.max_samples",
        "decontaminate_datasets are not mixed",
        {"data": {"decontaminate_datasets": [{"path": "x"}]}},
    ),
    (
        {"data": {"samples_per_epoch": 5, "mix_strategy": "interleave_over"}},
        "data.samples_per_epoch",
        "write mix_strategy: random",
        {"data": {"mix_strategy": "random"}},
    ),
    (
        {"data": {"near_duplicate_threshold": 0.5, "deduplicate": "exact"}},
        "data.near_duplicate_threshold",
        "is only used with deduplicate: near",
        {"data": {"deduplicate": "near"}},
    ),
    (
        {"data": {"decontaminate_ngram": 5}},
        "data.decontaminate_ngram",
        "is only used with decontaminate_datasets",
        {"data": {"decontaminate_datasets": [{"path": "x", "type": "kto"}]}},
    ),
    (
        {"data": {"truncation_mode": "drop"}},
        "data.truncation_mode",
        "no dataset has a max_seq_len",
        {"data": dataset(max_seq_len=9)},
    ),
    (
        {"data": {**dataset(max_seq_len=9), "max_prompt_len": 9}},
        "data.max_prompt_len",
        "data.datasets.0.max_seq_len (9); write less than 9",
        {"data": {"max_prompt_len": 8}},
    ),
    (
        {
            "data": {**dataset(type="kto"), "train_on_turns": "last"},
            "pipeline": {"stages": ["prepare"]},
        },
        "data.train_on_turns",
        "kto samples always train complete completions and",
        {"data": dataset(type="chat")},
    ),
    (
        {"data": {**dataset(type="chat"), "share_prompts": False}},
        "data.share_prompts",
        "samples of type chat have one completion",
        {"data": {"share_prompts": True}},
    ),
    (
        {
            "data": {
                "datasets": [
                    {"path": "a", "type": "tokenized"},
                    {"path": "b", "type": "preference"},
                ]
            }
        },
        "data.datasets.1.type",
        "preference contains preference samples",
        {"data": {"datasets": [{"path": "a"}, {"path": "b", "type": "chat"}]}},
    ),
    (
        {"data": dataset(type="preference_turns")},
        "data.datasets.0.type",
        "train.objective: sft cannot train on preference samples",
        {"train": {"objective": "preference"}},
    ),
    (
        {"data": {"datasets": [{"path": "a.jsonl", "streaming": True}]}},
        "data.datasets.0.streaming",
        "a.jsonl is not a hub dataset (org/name)",
        {"data": {"datasets": [{"path": "org/a", "streaming": True}]}},
    ),
    (
        {"data": {"datasets": [{"path": "org/a", "streaming": True, "split": "train[:10%]"}]}},
        "data.datasets.0.streaming",
        "a slice (train[:10%]) cannot be streamed",
        {"data": {"datasets": [{"path": "org/a", "streaming": True, "split": "train+test"}]}},
    ),
    (
        {"data": {"push_dataset_to_hub": "me/data"}},
        "data.push_dataset_to_hub",
        "write hf_use_auth_token: true",
        {"data": {"hf_use_auth_token": True}},
    ),
    (
        {"pipeline": {"task_runner_workers": 2}},
        "pipeline.task_runner_workers",
        "write task_runner: dask or ray",
        {"pipeline": {"task_runner": "dask"}},
    ),
    (
        {"train": {"micro_batch_size": "auto"}},
        "train.micro_batch_size",
        "write global_batch_size, such as 32",
        {"train": {"global_batch_size": 8}},
    ),
    (
        {
            "train": {
                "micro_batch_size": "auto",
                "global_batch_size": 8,
                "gradient_accumulation_steps": 4,
            }
        },
        "train.micro_batch_size",
        "leave gradient_accumulation_steps out",
        {"train": {"gradient_accumulation_steps": 1}},
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
        {"train": {"vision_lr": 1e-6}},
        "train.vision_lr",
        "is of the vision, which is frozen; write model.freeze: []",
        {"model": {"freeze": ["projector"]}},
    ),
    (
        {"train": {"projector_lr": 1e-6, "lr": 0.0, "lr_min": 0.0}, "model": {"freeze": []}},
        "train.lr",
        "is 0, and projector_lr follows its schedule",
        {"train": {"lr": 1e-5}},
    ),
    (
        {"model": {"encoders": {"audio": {"model_path": "x"}}}},
        "model.encoders.audio",
        "no architecture joins a new encoder of audio to a text model",
        {"model": {"encoders": {}}},
    ),
    (
        {"model": {"encoders": {"image": {"projector": "linear"}}}},
        "model.encoders.image",
        "names no vision model; write model_path (pre-trained weights), or config_path",
        {"model": {"encoders": {"image": {"config_path": "builtin:tiny-clip"}}}},
    ),
    (
        {"model": {"encoders": {"image": {"model_path": "x", "scale_factor": 3}}}},
        "model.encoders.image.scale_factor",
        "is of a pixel shuffle, and the projector is mlp",
        {"model": {"encoders": {"image": {"model_path": "x", "projector": "pixel_shuffle"}}}},
    ),
    (
        {"model": {"encoders": {"image": {"model_path": "x"}}, "trust_remote_code": True}},
        "model.encoders",
        "trust_remote_code: true runs the model's",
        {"model": {"trust_remote_code": False}},
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
        "is for hub repositories",
        {"push": {"create_pr": False}},
    ),
    (
        {"launch": {"nnodes": 2}},
        "launch.rdzv_endpoint",
        "2 nodes need a rendezvous endpoint",
        {"launch": {"rdzv_endpoint": "a:1"}},
    ),
    (
        {
            "launch": {"nnodes": 2, "rdzv_endpoint": "a:1"},
            "train": {"output_dir": "s3://bucket/out"},
        },
        "train.output_dir",
        "is a URL, but 2 nodes write their shards of a checkpoint",
        {"train": {"output_dir": "/shared/out"}},
    ),
    (
        {"data": {"dataset_prepared_path": "s3://b/x", "skip_prepare_dataset": True}},
        "data.skip_prepare_dataset",
        "uses prepared data in a local folder",
        {"data": {"skip_prepare_dataset": False}},
    ),
    (
        {"train": {"moe_bias_update_rate": 0.001}, "model": {"freeze_router": True}},
        "train.moe_bias_update_rate",
        "changes biases of routers",
        {"model": {"freeze_router": False}},
    ),
    (
        {"train": {"mlflow_tracking_uri": "http://host"}},
        "train.mlflow_tracking_uri",
        "is not used with use_mlflow: false",
        {"train": {"use_mlflow": True}},
    ),
    (
        {"launch": {"node_rank": 1}},
        "launch.node_rank",
        "write at most 0",
        {"launch": {"node_rank": 0}},
    ),
    (
        {"model": {"freeze": ["language", "projector", "vision"]}},
        "model.freeze",
        "all parts of a model, and nothing would be trained",
        {"model": {"freeze": ["language", "vision"]}},
    ),
    (
        {"model": {"freeze": []}, "lora": {"enable_lora": True}},
        "model.freeze",
        "all of the model's own weights are frozen",
        {"lora": {"enable_lora": False}},
    ),
]


@pytest.mark.parametrize(("sections", "where", "reason", "mended"), COMBINATIONS)
def test_impossible_combination_is_refused_and_mended_by_what_is_proposed(
    sections: dict[str, Any], where: str, reason: str, mended: dict[str, Any]
) -> None:
    refused_and_mended(sections, where, reason, mended)


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
        ({"1A": "x"}, "not a valid name of an environment variable"),
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
    assert detect_file_kind(name) == kind
