"""The flat names of a run's fields in the config of a training server (xorl's).

Data and learning rates come from clients while the server runs. Fields that concern the server
itself have no counterpart in a run.
"""

from collections.abc import Mapping
from typing import Any

from penstock.config.server.serving import ServerServing
from penstock.config.translate.dialect import (
    Dialect,
    Rule,
    Values,
    choice,
    is_flat,
    no_effect,
)
from penstock.config.translate.translation import Entry

BUILT_IN = "builtin:"
"""Prefix of models with random weights."""

MODEL = (
    *("config_path", "tokenizer_path", "backend", "attn_implementation", "moe_implementation"),
    *("ep_dispatch", "deepep_buffer_size_gb", "deepep_num_sms", "deepep_async_combine"),
    *("merge_qkv", "basic_modules", "foundation", "encoders", "router_fp32", "lm_head_fp32"),
    *("rmsnorm_native", "activation_native", "rope_native", "attention_cast_bf16"),
    "freeze_router",
)
TRAIN = (
    *("data_parallel_mode", "data_parallel_shard_size", "data_parallel_replicate_size"),
    *("tensor_parallel_size", "pipeline_parallel_size", "pipeline_parallel_schedule"),
    *("pp_variable_seq_lengths", "expert_parallel_size", "ulysses_parallel_size"),
    *("ringattn_parallel_size", "cp_fsdp_mode", "reshard_after_forward", "seed"),
    *("enable_mixed_precision", "enable_gradient_checkpointing", "enable_full_shard"),
    *("enable_activation_offload", "enable_compile", "enable_reentrant"),
    *("enable_forward_prefetch", "init_device", "ce_mode", "optimizer", "optimizer_dtype"),
    *("muon_lr", "muon_momentum", "muon_nesterov", "muon_ns_steps", "muon_adjust_lr_fn"),
    *("output_dir", "log_router_stats"),
)
LORA = (
    *("enable_lora", "lora_rank", "lora_alpha", "lora_target_modules", "moe_shared_lora"),
    *("moe_hybrid_shared_lora", "enable_qlora", "quant_format", "quant_group_size"),
    *("merge_lora_interval", "reset_optimizer_on_merge"),
)

SAME: Mapping[str, str] = {
    **{name: f"model.{name}" for name in MODEL},
    **{name: f"train.{name}" for name in TRAIN},
    **{name: f"lora.{name}" for name in LORA},
    **{name: f"launch.{name}" for name in ("nnodes", "node_rank")},
    **{name: f"data.{name}" for name in ("sample_packing_sequence_len", "pad_to_multiple_of")},
    "qlora_exclude_modules": "lora.exclude_modules",
}

OF_THE_SERVER: Mapping[str, str] = {
    **dict.fromkeys(ServerServing.model_fields, "of the server: a run serves nobody"),
    **{
        name: "of the server: how its processes reach one another"
        for name in ServerServing.model_fields
        if name.startswith(("worker_", "engine_"))
    },
    "model_name": "of the server: what clients call the model",
    "storage_limit": "of the server: train.save_total_limit bounds what a run keeps",
    "idle_session_timeout": "of the server: a run has no sessions",
    "skip_initial_checkpoint": "of the server: a run saves nothing before its first step",
    "log_level": "of the server",
    "enable_self_test": "of the server: a run is tried by its first step",
    "sync_inference_method": "of the server: a run sends no weights while it trains",
    "sync_allowed_hosts": "of the server: a run sends no weights while it trains",
}
"""Reasons why a field has no counterpart in a run, unless `COMPUTED` has a rule for it."""


def _model(entry: Entry) -> None:
    if not entry.value.startswith(BUILT_IN):
        entry.put("model.model_path", entry.value)
    elif entry.get("config_path"):
        entry.no_effect("config_path says which model starts from the seed")
    else:
        entry.put("model.config_path", entry.value)


def _weights(entry: Entry) -> None:
    if entry.value == "dcp":
        entry.refuse("weights are read in Hugging Face's format; write auto or safetensors")
    else:
        entry.no_effect("weights are read from safetensors wherever they are")


def _packing(entry: Entry) -> None:
    if entry.value:
        entry.no_effect("samples share rows")
    else:
        entry.approximated("samples share rows all the same, and do not see one another there")


def _strategy(entry: Entry) -> None:
    ours = {"sequential": "sequential", "best_fit": "multipack", "balanced_dp": "multipack"}
    choice("data.sample_packing_method", ours)(entry)
    if entry.value == "balanced_dp":
        entry.approximated("rows are filled well, and replicas share them out as they come")


def _checkpoint(entry: Entry) -> None:
    entry.put("train.load_checkpoint_path", entry.value or None)


def _workers(entry: Entry) -> None:
    if entry.value == "auto":
        entry.no_effect("as many as the parallel sizes multiply to")
    else:
        entry.put("launch.nproc_per_node", entry.value)


def _meeting(entry: Entry) -> None:
    entry.put("launch.rdzv_endpoint", f"{entry.value}:{entry.get('master_port', 29500)}")


def _port(entry: Entry) -> None:
    if entry.get("master_addr"):
        entry.decides("launch.rdzv_endpoint")
    else:
        entry.no_effect("there is no master_addr")


COMPUTED: Mapping[str, Rule] = {
    **{key: no_effect(why) for key, why in OF_THE_SERVER.items() if key not in SAME},
    "model_path": _model,
    "load_weights_mode": _weights,
    "enable_packing": _packing,
    "sample_packing_strategy": _strategy,
    "load_checkpoint_path": _checkpoint,
    "ckpt_manager": choice("train.ckpt_manager", {"dcp": "dcp"}),
    "nproc_per_node": _workers,
    "master_addr": _meeting,
    "master_port": _port,
    "log_gradient_norms": choice("train.log_grad_norm", {True: "layers", False: True}),
}

DEFAULTS: Mapping[str, Any] = {
    "lm_head_fp32": True,
    "freeze_router": True,
    "lora_rank": 32,
    "output_dir": "outputs",
}
"""Defaults that differ from those of a run and change results."""

UNMISTAKABLE = {*SAME, *COMPUTED} - {"model_path"}


def _recognizes(values: Values) -> bool:
    """Whether a file has `model_path` and another field of a server at the top. A file with data
    sets is a run's whose sections were left out."""
    is_run = "datasets" in values
    told = "model_path" in values and bool(UNMISTAKABLE & values.keys())
    return is_flat(values) and told and not is_run


SERVER = Dialect(
    name="server",
    title="a training server",
    recognizes=_recognizes,
    same=SAME,
    computed=COMPUTED,
    defaults=DEFAULTS,
    placeholders={"data.datasets": [{"path": "dummy"}]},
)
