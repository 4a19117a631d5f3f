"""A server's file is read strictly, with xorl's names and defaults, and workers get all of it."""

from contextlib import suppress
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import generate_docs  # noqa: F401 - it reads the fields' docstrings
from penstock.config.loading.cli_overrides import Override
from penstock.config.server.config import UNITS, ServerConfig, parse_byte_size, to_run_config
from penstock.config.server.load import load_server
from penstock.config.server.run_fields import SAME
from penstock.core.errors import ConfigError
from penstock.engine.distributed.validate_layout import layout_errors, micro_batch_padding

SAID_BY_OTHERS = {"model_name": None, "config_path": None, "tokenizer_path": None}
"""Unset here, where the list of fields says that they are another's."""

OTHERS: dict[str, Any] = {
    "config_path": "org/config",
    "tokenizer_path": "builtin:bytes",
    "backend": "transformers",
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
    "node_rank": 1,
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
    "nnodes": {"master_addr": "first"},
    "node_rank": {"master_addr": "first", "nnodes": 2},
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
    values = {"model_path": "org/base", **NEEDS.get(name, {}), name: other(name)}
    at = to_run_config(ServerConfig.model_validate(values))
    for step in SAME[name].split("."):
        at = getattr(at, step)
    assert at == other(name)


def test_workers_start_on_the_device_that_the_file_says():
    fields = {"model_path": "org/m", "data_parallel_mode": "ddp", "init_device": "cpu"}
    config = ServerConfig.model_validate(fields)
    assert to_run_config(config).train.init_device == "cpu"


def test_a_file_that_writes_every_default_is_as_good_as_one_that_writes_none():
    bare = ServerConfig(model_path="org/m")
    full = ServerConfig.model_validate(bare.model_dump())
    assert full == bare
    assert full.model_fields_set == set(ServerConfig.model_fields)
    assert to_run_config(full).train.seed == to_run_config(bare).train.seed == 42


def test_a_default_is_no_contract_and_a_written_value_is():
    assert to_run_config(ServerConfig(model_path="org/m")).model.attn_implementation is None
    fields = {"model_path": "org/m", "attn_implementation": "flash_attention_3"}
    written = ServerConfig.model_validate(fields)
    assert to_run_config(written).model.attn_implementation == "flash_attention_3"


def test_padding_that_nobody_wrote_gives_way_to_a_layout_and_a_length():
    layout = {"model_path": "m", "ulysses_parallel_size": 3}
    run = to_run_config(ServerConfig.model_validate(layout | {"sample_packing_sequence_len": 1000}))
    assert micro_batch_padding(run.data, run.train) == 3 * 128
    assert layout_errors(run, 3, None) == []
    written = to_run_config(ServerConfig.model_validate(layout | {"pad_to_multiple_of": 64}))
    assert "pad_to_multiple_of is 64" in str(layout_errors(written, 3, None)[0])


def test_numbers_differ_from_those_of_a_run_where_xorls_do():
    run = to_run_config(ServerConfig(model_path="org/m"))
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
    built_in = {"model_path": "builtin:tiny-qwen3", "tokenizer_path": "builtin:bytes"}
    for named, found in (({}, "builtin:tiny-qwen3"), ({"config_path": "org/c"}, "org/c")):
        run = to_run_config(ServerConfig.model_validate({**built_in, **named}))
        assert run.model.model_path is None
        assert run.model.config_path == found
    assert to_run_config(ServerConfig(model_path="org/m")).model.model_path == "org/m"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("10TB", 10**13), ("500MB", 5 * 10**8), ("1.5 GiB", 3 * 2**29), ("7", 7)),
        *(("2kb", 2000), ("9007199254740993", 2**53 + 1), ("9" * 400, int("9" * 400))),
    ],
)
def test_a_size_is_read_as_it_is_meant(text, size):
    assert parse_byte_size(text) == size


@given(
    st.text(max_size=12)
    | st.from_regex(r"\d{1,3} ?[kmgtpKMGTP\u212a]?[iI\u0131]?b?", fullmatch=True)
)
def test_a_size_is_a_number_with_a_unit_or_refused(text):
    size = None
    with suppress(ValueError):
        size = parse_byte_size(text)
    assert size is None or text.strip().isascii()
    assert (size or 0) < 1024 ** (len(UNITS) - 1) * 10 ** len(text)


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
    config: Any = load_server(path, overrides)
    assert (config.lora_rank, config.model_name) == (64, "12")
    assert config.foundation == {"num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model:\n  model_path: org/m\ntrain:\n  output_dir: out\n", "it has the section model"),
        ("base_model: org/m\nmicro_batch_size: 1\ndatasets: [{path: a}]\n", "written for Axolotl"),
    ],
)
def test_a_runs_file_is_told_from_a_servers(tmp_path, text, says):
    path = file(tmp_path, text)
    with pytest.raises(ConfigError, match=f"no server's file: .*{says}"):
        load_server(path)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"nnodes": 2}, ["master_addr: 2 nodes need a rendezvous address"]),
        (
            {"nnodes": 2, "node_rank": 2, "master_addr": "a"},
            ["node_rank: 2 is not a rank of 2 node"],
        ),
        ({"nproc_per_node": 0}, ["nproc_per_node: is 0; it must be at least 1"]),
        (
            {"worker_bind_address": "tcp://h:65536"},
            ["worker_bind_address: is tcp://h:65536; ports"],
        ),
        ({"output_dir": "s3://bucket/models"}, ["output_dir: is s3://bucket/models; a server"]),
        (
            {"sample_packing_sequence_len": 1000, "pad_to_multiple_of": 64, "nnodes": 3},
            [
                "master_addr: 3 nodes need a rendezvous address",
                "pad_to_multiple_of: 64 does not divide sample_packing_sequence_len (1000)",
            ],
        ),
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_settings_that_do_not_fit_one_another_are_all_told_by_their_own_names(
    tmp_path, fields, says
):
    path = file(tmp_path, yaml.safe_dump({"model_path": "m", **fields}))
    with pytest.raises(ConfigError) as caught:
        load_server(path)
    lines = [
        line.removeprefix(f"{path}:").partition(": ")[2] for line in str(caught.value).splitlines()
    ]
    assert len(lines) == len(says)
    for line, start in zip(sorted(lines), says, strict=True):
        assert line.startswith(start)


BAD_VALUES: list[Any] = [None, True, -1, 0, 7, 2.5, "x", "yes", "", [], [None], {}, {"a": 1}]


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.dictionaries(
        st.sampled_from([*ServerConfig.model_fields, "unknown_name"]),
        st.sampled_from(BAD_VALUES),
        max_size=4,
    )
)
def test_any_values_make_a_server_or_a_refusal_in_our_words(tmp_path_factory, values):
    path = file(tmp_path_factory.getbasetemp(), yaml.safe_dump(values))
    try:
        config = load_server(path)
    except ConfigError as refused:
        told = str(refused)
        assert "pydantic" not in told
        assert "Input should" not in told
        assert all(line.startswith(f"{path}") and ": " in line for line in told.splitlines())
    else:
        assert to_run_config(config)
