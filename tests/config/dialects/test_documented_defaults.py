"""A setting written with its documented default asks for no more than one that is left out."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.config.loading.load import load, loads
from penstock.config.schema.run import RunConfig
from penstock.config.server.config import ServerConfig, validate_server
from penstock.config.server.load import load_server
from penstock.config.translate.translation import put_at
from penstock.core.errors import ConfigError
from tests.config.values import smallest
from tests.turns import taking_turns

LOCAL: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "golden" / "local_fields.json").read_text()
)
LOCAL["train"]["init_device"] = "cuda"

QLORA = {"enable_lora": True, "enable_qlora": True}
FORMATS = ("nvfp4", "block_fp8", "int8")
"""Of the others a group of 16 columns is one of several choices, and is used as it is written."""

CONTEXTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "text": {"data": {"datasets": [{"path": "d", "type": "text", "max_seq_len": 100}]}},
    "odd rows": {"data": {"sample_packing_sequence_len": 1000}},
    "multipack": {"data": {"sample_packing_method": "multipack"}},
    "held out": {"data": {"val_set_size": 5}},
    "no workers": {"data": {"dataloader_num_workers": 0}},
    "pushed": {"data": {"push_dataset_to_hub": "a/b", "hf_use_auth_token": True}},
    "prepared": {"data": {"skip_prepare_dataset": True}},
    **{mode: {"train": {"data_parallel_mode": mode}} for mode in ("none", "ddp")},
    **{name: {"train": {"optimizer": name}} for name in ("muon", "anyprecision_adamw", "sgd")},
    "pipeline": {"train": {"pipeline_parallel_size": 2}},
    "tensor": {"train": {"tensor_parallel_size": 2}},
    "deepep": {"model": {"ep_dispatch": "deepep"}, "train": {"expert_parallel_size": 2}},
    "cosine": {"train": {"lr_decay_style": "cosine", "lr_warmup_ratio": 0.1}},
    "nothing recomputed": {"train": {"enable_gradient_checkpointing": False}},
    "offload": {"train": {"enable_activation_offload": True}},
    "profile": {"train": {"enable_profiling": True}},
    "resumed": {"train": {"load_checkpoint_path": "auto"}},
    "lora": {"lora": {"enable_lora": True}},
    "merged": {"lora": {"enable_lora": True, "merge_lora_interval": 5}},
    **{name: {"lora": {**QLORA, "quant_format": name}} for name in FORMATS},
    "noise": {"lora": {**QLORA, "enable_aqn": True}},
    "implied": {"lora": {"enable_qlora": True}},
    **{f"zero {stage}": {"train": {"zero_stage": stage}} for stage in (1, 2, 3)},
    **{name: {"train": {"precision": name}} for name in ("fp32", "bf16", "fp16_mixed")},
    "rows of a step": {"train": {"global_batch_size": 8}},
    "sent": {"push": {"url": "file:///models"}},
}


def all_of(settings: dict[str, Any]) -> list[tuple[str, Any]]:
    """The documented defaults, by dotted name, that the settings do not write."""
    found: list[tuple[str, Any]] = []
    for section, fields in LOCAL.items():
        place = "data.datasets.0" if section == "data.datasets[]" else section
        at: Any = settings
        for step in place.split("."):
            at = at[int(step)] if step.isdecimal() else at.get(step, {})
        found += [
            (f"{place}.{name}", value)
            for name, value in fields.items()
            if value != "REQUIRED" and name not in at and f"{place}.{name}" != "model.config_path"
        ]
    return found


def with_defaults(settings: dict[str, Any], defaults: list[tuple[str, Any]]) -> dict[str, Any]:
    changed = deepcopy(settings)
    for name, value in defaults:
        if name.startswith("data.datasets.0."):
            changed["data"]["datasets"][0][name.rpartition(".")[2]] = deepcopy(value)
        else:
            put_at(changed, name, deepcopy(value))
    return changed


CONTRACTS = (
    *("sample_packing_sequence_len", "dataloader_drop_last"),
    *("dataloader_num_workers", "dataloader_prefetch_factor"),
)
"""Settings of `data` whose documented default says more, written, than they mean left out: null and
the documented default are two values."""


def effect(run: RunConfig) -> dict[str, Any]:
    """All settings that a documented default must leave as they are."""
    known = run.model_dump(exclude={"data": {*CONTRACTS}})
    for dataset in known["data"]["datasets"]:
        dataset["type"] = dataset["type"] or "tokenized"
    # One that is left out goes by the machine.
    known["train"]["init_device"] = known["train"]["init_device"] or "cuda"
    return known


@pytest.mark.parametrize("context", taking_turns(CONTEXTS, 12))
def test_a_documented_default_may_be_written_wherever_it_may_be_left_out(context: str) -> None:
    settings = smallest(**CONTEXTS[context])
    expected = effect(loads(settings))
    defaults = all_of(settings)
    assert len(defaults) > 100
    for one in defaults:
        assert effect(loads(with_defaults(settings, [one]))) == expected, one
    assert effect(loads(with_defaults(settings, defaults))) == expected


def notices_of(tmp_path: Path, **sections: dict[str, Any]) -> tuple[RunConfig, list[str]]:
    file, told = tmp_path / "run.yaml", list[str]()
    file.write_text(yaml.safe_dump(smallest(**sections)))
    return load(file, notify=told.append), told


def test_a_default_that_cannot_be_used_is_told_in_one_line(tmp_path: Path) -> None:
    run, told = notices_of(
        tmp_path,
        lora={"enable_lora": False, "enable_qlora": True, "quant_format": "block_fp8"}
        | {"quant_group_size": 16},
        train={"init_device": "cuda", "lr": 2e-4},
        data={"sample_packing_sequence_len": 1000, "pad_to_multiple_of": 128},
    )
    assert told == [
        "lora.enable_lora: false is the documented default, and enable_qlora: true trains adapters:"
        " true is used",
        "lora.quant_group_size: 16 is the documented default, and block_fp8 has groups of 128,"
        " which is used",
        "train.init_device: cuda is the documented default, and data_parallel_mode: fsdp2"
        " initializes on meta, which is used",
        "data.pad_to_multiple_of: 128 is the documented default, and does not divide"
        " sample_packing_sequence_len (1000): full sequences are padded beyond it",
    ]
    assert run.lora.enable_lora
    assert run.lora.quant_group_size is None
    assert run.train.init_device is None
    _, told = notices_of(
        tmp_path, lora={"enable_qlora": True}, train={"init_device": "meta", "lr": 2e-4}
    )
    assert told == []


def test_a_default_that_another_setting_overrules_is_told_in_one_line(tmp_path: Path) -> None:
    overruled = {"enable_full_shard": True, "enable_mixed_precision": True}
    run, told = notices_of(tmp_path, train={"zero_stage": 2, "precision": "bf16", **overruled})
    assert told == [
        "train.enable_mixed_precision: true is the documented default, and precision: bf16 decides",
        "train.enable_full_shard: true is the documented default, and zero_stage: 2 decides",
    ]
    assert (run.train.resolved_zero_stage, run.train.resolved_precision) == (2, "bf16")


@pytest.mark.parametrize(
    ("section", "fields", "why"),
    [
        ("lora", {**QLORA, "quant_format": "block_fp8", "quant_group_size": 64}, "groups of 128"),
        ("train", {"init_device": "cpu"}, "fsdp2 cannot initialize on cpu"),
    ],
)
def test_another_value_that_cannot_be_used_is_refused(
    section: str, fields: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        loads(smallest(**{section: fields}))


def test_an_empty_checkpoint_path_starts_anew() -> None:
    run = loads(smallest(train={"load_checkpoint_path": ""}))
    assert run.train.load_checkpoint_path is None
    assert run == loads(smallest())


def test_muon_with_adapters_says_in_one_line_what_steps_them(tmp_path: Path) -> None:
    _, told = notices_of(
        tmp_path, train={"optimizer": "muon", "lr": 2e-4}, lora={"enable_lora": True}
    )
    assert len(told) == 1
    assert "AdamW trains the adapters" in told[0]
    assert notices_of(tmp_path, train={"optimizer": "muon"})[1] == []


SERVERS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "lora": {"enable_lora": True},
    "implied": {"enable_qlora": True},
    "block_fp8": {"enable_qlora": True, "quant_format": "block_fp8"},
    "int8": {**QLORA, "quant_format": "int8"},
    "muon": {"optimizer": "muon"},
    "ddp": {"data_parallel_mode": "ddp"},
    "odd rows": {"sample_packing_sequence_len": 1000},
    "pipeline": {"pipeline_parallel_size": 2},
    "merged": {"enable_lora": True, "merge_lora_interval": 5},
}

OF_THE_MACHINE = (
    *("attn_implementation", "init_device", "ce_mode"),
    *("enable_forward_prefetch", "reshard_after_forward"),
)
"""Written, they are contracts; left out, they go by the machine and the layout. Speed and memory
alone depend on them."""


@pytest.mark.parametrize("context", taking_turns(SERVERS, 4))
def test_a_servers_default_may_be_written_wherever_it_may_be_left_out(context: str) -> None:
    base = {"model_path": "org/m", **SERVERS[context]}
    expected = validate_server(ServerConfig.model_validate(base))
    assert not expected.faults
    fields = ServerConfig.model_fields
    defaults = {
        name: field.get_default(call_default_factory=True)
        for name, field in fields.items()
        if name not in base and name not in OF_THE_MACHINE
    }
    for given in [*({name: value} for name, value in defaults.items()), defaults]:
        found = validate_server(ServerConfig.model_validate({**base, **given}))
        assert not found.faults, (given, found.faults)
        assert found.run == expected.run, given


def test_a_servers_notice_names_the_settings_of_its_file(tmp_path: Path) -> None:
    file, told = tmp_path / "server.yaml", list[str]()
    file.write_text("model_path: builtin:tiny-qwen3\nlora_rank: 8\n")
    load_server(file, notify=told.append)
    assert told == [
        "lora_rank: is not used without enable_lora: true, and all weights are trained; write"
        " enable_lora: true, or false to confirm"
    ]


def test_a_server_tells_of_a_default_that_it_cannot_use_under_its_own_name(tmp_path: Path) -> None:
    file, told = tmp_path / "server.yaml", list[str]()
    file.write_text(
        "model_path: builtin:tiny-qwen3\nenable_qlora: true\nqlora_exclude_modules: [lm_head]\n"
        "quant_format: block_fp8\nquant_group_size: 16\n"
    )
    load_server(file, notify=told.append)
    assert len(told) == 1
    assert told[0].startswith("quant_group_size: 16 is the documented default")
