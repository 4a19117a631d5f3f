"""A server's file is read strictly, with xorl's names and defaults, and workers get all of it."""

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.dialects.server import SAME
from penstock.config.overrides import Override
from penstock.config.server import ServerConfig, bytes_of, run_of
from penstock.config.server_load import load_server
from penstock.core.errors import ConfigError

SAID_BY_OTHERS = {"model_name": None, "config_path": None, "tokenizer_path": None}
"""Unset here, where the list of fields says that they are another's."""

OTHERS: dict[str, Any] = {
    "model_path": "org/model",
    "config_path": "org/config",
    "tokenizer_path": "builtin:bytes",
    "attn_implementation": "sdpa",
    "moe_implementation": "eager",
    "ep_dispatch": "deepep",
    "basic_modules": ["Block"],
    "foundation": {"num_hidden_layers": 3},
    "data_parallel_mode": "ddp",
    "pipeline_parallel_schedule": "GPipe",
    "cp_fsdp_mode": "none",
    "init_device": "meta",
    "ce_mode": "eager",
    "optimizer": "muon",
    "optimizer_dtype": "fp32",
    "muon_adjust_lr_fn": "original",
    "output_dir": "elsewhere",
    "lora_target_modules": ["q_proj"],
    "quant_format": "block_fp8",
    "quant_group_size": 128,
    "qlora_exclude_modules": ["layers.0"],
    "deepep_num_sms": 24,
    "sample_packing_sequence_len": 4096,
    "muon_momentum": 0.5,
    "muon_lr": 0.5,
    "deepep_buffer_size_gb": 3.0,
    "lora_alpha": 7,
    "lora_rank": 4,
    "seed": 7,
    "muon_ns_steps": 7,
}
"""Another value of each setting than its default, where twice of it or its opposite is none."""

EXPERTS = {"ep_dispatch": "deepep", "expert_parallel_size": 2, "data_parallel_shard_size": 2}

NEEDS: dict[str, dict[str, Any]] = {
    "moe_shared_lora": {"enable_lora": True},
    "moe_hybrid_shared_lora": {"enable_lora": True},
    "enable_qlora": {"enable_lora": True},
    "quant_format": {"enable_lora": True, "enable_qlora": True},
    "quant_group_size": {"enable_lora": True, "enable_qlora": True, "quant_format": "block_fp8"},
    "qlora_exclude_modules": {"enable_lora": True, "enable_qlora": True},
    "merge_lora_interval": {"enable_lora": True},
    "reset_optimizer_on_merge": {"enable_lora": True, "merge_lora_interval": 2},
    "lora_target_modules": {"enable_lora": True},
    "lora_rank": {"enable_lora": True},
    "lora_alpha": {"enable_lora": True},
    "tensor_parallel_size": {"merge_qkv": False},
    "ep_dispatch": EXPERTS,
    "deepep_buffer_size_gb": EXPERTS,
    "deepep_num_sms": EXPERTS,
    "deepep_async_combine": EXPERTS,
}
"""What a setting means nothing without."""


def other(name):
    """A value of this setting that is not its default."""
    if name in OTHERS:
        return OTHERS[name]
    default = ServerConfig.model_fields[name].get_default(call_default_factory=True)
    if isinstance(default, bool):
        return not default
    assert isinstance(default, int), name
    return max(2, 2 * default)


def file(tmp_path, text):
    path = tmp_path / "server.yaml"
    path.write_text(text)
    return path


def test_every_field_has_the_name_and_the_default_that_clients_of_xorl_know(shared):
    listed = yaml.safe_load((shared / "spec" / "server_fields.yaml").read_text())
    assert len(listed) == 82
    for entry in listed:
        name = entry["field"]
        field = ServerConfig.model_fields[name]
        assert field.description, name
        if name == "worker_bind_host":
            assert field.default == "127.0.0.1"
        elif entry["default"] == "required":
            assert field.is_required()
        else:
            default = field.get_default(call_default_factory=True)
            assert default == SAID_BY_OTHERS.get(name, entry["default"]), name


@pytest.mark.parametrize("name", sorted(SAME.keys() - {"encoders"}))
def test_what_a_file_says_of_training_is_what_workers_are_told(name):
    base = {} if name == "model_path" else {"model_path": "org/base"}
    values = {**base, **NEEDS.get(name, {}), name: other(name)}
    at = run_of(ServerConfig.model_validate(values))
    for step in SAME[name].split("."):
        at = getattr(at, step)
    assert at == other(name)


def test_a_file_that_writes_every_default_is_as_good_as_one_that_writes_none():
    bare = ServerConfig(model_path="org/m")
    full = ServerConfig.model_validate(bare.model_dump())
    assert full == bare
    assert full.model_fields_set == set(ServerConfig.model_fields)
    assert run_of(full).train.seed == run_of(bare).train.seed == 42


def test_a_default_is_no_contract_and_a_written_value_is():
    assert run_of(ServerConfig(model_path="org/m")).model.attn_implementation is None
    written = ServerConfig(model_path="org/m", attn_implementation="flash_attention_3")
    assert run_of(written).model.attn_implementation == "flash_attention_3"


def test_numbers_differ_from_those_of_a_run_where_xorls_do():
    run = run_of(ServerConfig(model_path="org/m"))
    assert run.model.lm_head_fp32
    assert run.model.freeze_router
    assert run.lora.lora_rank == 32


def test_there_are_as_many_workers_as_parallel_sizes_multiply_to():
    def workers(**fields):
        return ServerConfig(model_path="m", **fields).num_workers

    assert workers() == 1
    assert workers(data_parallel_shard_size=2, tensor_parallel_size=2, merge_qkv=False) == 4
    assert workers(data_parallel_shard_size=4, nnodes=2, master_addr="a") == 2
    assert workers(data_parallel_shard_size=-1) == "auto"
    assert workers(nproc_per_node=3, data_parallel_shard_size=-1) == 3


def test_a_built_in_model_starts_from_the_seed():
    run = run_of(ServerConfig(model_path="builtin:tiny-qwen3", tokenizer_path="builtin:bytes"))
    assert run.model.model_path is None
    assert run.model.config_path == "builtin:tiny-qwen3"


@pytest.mark.parametrize(
    ("text", "size"),
    [("10TB", 10**13), ("500MB", 5 * 10**8), ("1.5 GiB", 3 * 2**29), ("7", 7), ("2kb", 2000)],
)
def test_a_size_is_read_as_it_is_meant(text, size):
    assert bytes_of(text) == size


@given(st.text(max_size=12))
def test_a_size_is_a_whole_number_or_refused(text):
    try:
        size = bytes_of(text)
    except ValueError as error:
        said = str(error)
        size = 0
        if "10GB" not in said:
            raise
    assert size >= 0


def test_all_faults_are_told_at_once_with_their_lines(tmp_path):
    path = file(
        tmp_path,
        """\
model_path: org/m
tensor_paralel_size: 2
lora_rank: "8"
optimizer: adamv
storage_limit: lots
worker_max_retries: -1
enable_lora: true
enable_qlora: true
quant_group_size: 7
load_weights_mode: dcp
ckpt_manager: torch
worker_bind_address: nowhere
""",
    )
    overrides = [
        Override("server.lora_alpha", "x"),
        Override("train.lr", "3"),
        Override("server.model_name", "12"),
    ]
    with pytest.raises(ConfigError) as caught:
        load_server(path, overrides)
    lines = str(caught.value).splitlines()
    wanted = [
        (f"{path}:2: tensor_paralel_size: ", "did you mean tensor_parallel_size?"),
        (f"{path}:3: lora_rank: ", "wanted a whole number"),
        (f"{path}:4: optimizer: ", "did you mean adamw?"),
        (f"{path}:5: storage_limit: ", "such as 10GB"),
        (f"{path}:6: worker_max_retries: ", "at least 0"),
        (f"{path}:9: quant_group_size: ", "groups of 16"),
        (f"{path}:10: load_weights_mode: ", "auto or safetensors"),
        (f"{path}:11: ckpt_manager: ", "write dcp"),
        (f"{path}:12: worker_bind_address: ", "tcp://host:port"),
        ("--server.lora_alpha: ", "a number"),
        ("--train.lr: ", "write --server.lr"),
    ]
    assert len(lines) == len(wanted), lines
    for line, (start, part) in zip(lines, wanted, strict=True):
        assert line.startswith(start)
        assert part in line


def test_a_fault_that_only_the_workers_would_find_stands_at_the_servers_own_key(tmp_path):
    path = file(tmp_path, "model_path: m\nenable_lora: true\nqlora_exclude_modules: [a]\n")
    with pytest.raises(ConfigError) as caught:
        load_server(path)
    [line] = str(caught.value).splitlines()
    assert line.startswith(f"{path}:3: qlora_exclude_modules: ")
    assert "lora.exclude_modules" in line


def test_options_come_last_and_read_numbers_as_text_where_text_is_meant(tmp_path):
    path = file(tmp_path, "model_path: org/m\nlora_rank: 4\n")
    overrides = [
        Override("server.lora_rank", "64"),
        Override("server.model_name", "12"),
        Override("server.foundation.num_hidden_layers", "2"),
    ]
    config = load_server(path, overrides)
    assert (config.lora_rank, config.model_name) == (64, "12")
    assert config.foundation == {"num_hidden_layers": 2}


def test_a_runs_file_is_told_from_a_servers(tmp_path):
    path = file(tmp_path, "model:\n  model_path: org/m\ntrain:\n  output_dir: out\n")
    with pytest.raises(ConfigError, match="no server's file"):
        load_server(path)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"nnodes": 2}, "master_addr"),
        ({"output_dir": "s3://bucket/models"}, "a folder of this machine"),
        ({"nnodes": 2, "node_rank": 2, "master_addr": "a"}, "counted from 0"),
        ({"sample_packing_sequence_len": 1000}, "next multiple is 1024"),
    ],
)
def test_settings_that_do_not_fit_one_another_are_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        ServerConfig(model_path="m", **fields)
