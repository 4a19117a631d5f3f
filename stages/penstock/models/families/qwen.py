"""Qwen with experts, and Qwen3-Next and 3.5: three layers of Gated DeltaNet, then one of gated
attention."""

from dataclasses import replace
from typing import Any

from penstock.models.decoder_config import DecoderConfig, ExpertNames, ExpertsConfig
from penstock.models.families.layers import (
    layers_of_kind,
    read_count,
    read_experts,
    unsupported_activation,
)
from penstock.models.family import LINEAR_PARTS, Family
from penstock.models.hf_config import (
    FULL,
    LINEAR,
    HfConfig,
    attention_bias,
    aux_loss_coef,
    config_get,
    config_require,
    decoder_config,
    rope_parameters,
    sliding,
    sliding_everywhere,
    window_if_used,
)
from penstock.models.linear_config import FIELDS, GatedDeltaConfig
from penstock.models.mtp_config import QWEN3_NEXT_MTP
from penstock.models.tp_roles import LINEAR_ATTENTION_ROLES

SHARED_NAMES = ExpertNames(shared="shared_expert", known_to_peft=False)
STACK_NAMES = ExpertNames(gate_up_stack="experts.gate_up_proj", down_stack="experts.down_proj")
# Transformers' defaults.
DELTA_SIZES = {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128, "kernel": 4}


def qwen_experts(
    hf: HfConfig, counts: tuple[str, ...] = ("num_experts",), *, count: int, **specific: Any
) -> ExpertsConfig | None:
    """The experts of the layers that `decoder_sparse_step` and `mlp_only_layers` leave to them, as
    `read_experts`; none for a number of 0."""
    step, dense = config_get(hf, "decoder_sparse_step", 1), config_get(hf, "mlp_only_layers", [])
    layers = [
        layer
        for layer in range(config_require(hf, "num_hidden_layers"))
        if layer not in dense and (layer + 1) % step == 0
    ]
    layers = layers if read_count(hf, counts, count) else []
    coefficient = aux_loss_coef(hf)
    return read_experts(hf, layers, counts, count=count, aux_loss_coef=coefficient, **specific)


def read_qwen2_moe(hf: HfConfig) -> DecoderConfig:
    """Qwen 1.5 and Qwen 2 MoE: softmax top-k router, a shared expert with a gated output."""
    last = config_get(hf, "max_window_layers", 28)
    # Every second of the first layers, as Qwen2MoeConfig; dense Qwen has windows in the last ones.
    windows = range(0, min(last, config_require(hf, "num_hidden_layers")), 2)
    return decoder_config(
        hf,
        defaults={"num_key_value_heads": 16},
        qkv_bias=bool(config_get(hf, "qkv_bias", True)),
        experts=qwen_experts(
            hf,
            count=60,
            chosen=4,
            width=1408,
            normalized=False,
            shared_intermediate_size=config_get(hf, "shared_expert_intermediate_size", 5632),
            shared_gate=True,
            names=SHARED_NAMES,
        ),
        **sliding(hf, window_if_used(hf), windows),
    )


def read_qwen3_moe(hf: HfConfig) -> DecoderConfig:
    """Qwen3 MoE: softmax top-k router, no shared experts."""
    counts = ("num_experts", "num_local_experts")
    return decoder_config(
        hf,
        qk_norm=True,
        experts=qwen_experts(hf, counts, count=128, chosen=8, width=768, normalized=False),
        **attention_bias(hf),
        **sliding_everywhere(hf, window_if_used(hf)),
    )


def read_qwen3_vl_moe(hf: HfConfig) -> DecoderConfig:
    """The language model of Qwen3-VL with experts: Qwen3-MoE whose expert weights always sum to 1,
    and whose checkpoints stack the experts of a layer."""
    counts = ("num_experts", "num_local_experts")
    return decoder_config(
        hf,
        defaults={"num_key_value_heads": 16},
        qk_norm=True,
        experts=qwen_experts(hf, counts, count=60, chosen=4, width=1408, names=STACK_NAMES),
        **attention_bias(hf),
    )


def _with_delta_layers(hf: HfConfig, *, keys: int, fused: bool, **specific: Any) -> DecoderConfig:
    """The DecoderConfig with layers of Gated DeltaNet and of gated softmax attention. `keys` is the
    family's default of num_key_value_heads."""
    sizes = {name: config_get(hf, field, DELTA_SIZES[name]) for name, field in FIELDS.items()}
    every = config_get(hf, "full_attention_interval", 4)
    layers = range(config_require(hf, "num_hidden_layers"))
    types = [FULL if (layer + 1) % every == 0 else LINEAR for layer in layers]
    return decoder_config(
        hf,
        defaults={"num_key_value_heads": keys, "head_dim": 256},
        not_native=unsupported_activation(hf),
        norm="rms_1p",
        qk_norm=True,
        output_gate=True,
        rope_parameters=rope_parameters(hf, share=0.25),
        linear=GatedDeltaConfig(**sizes, fused=fused),
        linear_layers=layers_of_kind(hf, LINEAR, types),
        **attention_bias(hf),
        **specific,
    )


def read_qwen3_next(hf: HfConfig) -> DecoderConfig:
    """Qwen3-Next: experts with a gated shared expert."""
    experts = qwen_experts(
        hf,
        count=512,
        chosen=10,
        width=512,
        normalized=True,
        shared_intermediate_size=config_get(hf, "shared_expert_intermediate_size", 512),
        shared_gate=True,
        names=SHARED_NAMES,
    )
    inner = config_get(hf, "intermediate_size", 5632)
    return _with_delta_layers(hf, keys=2, fused=True, intermediate_size=inner, experts=experts)


def read_qwen3_5(hf: HfConfig) -> DecoderConfig:
    """Qwen3.5, dense: Qwen3-Next with separate input projections of linear attention."""
    return _with_delta_layers(hf, keys=4, fused=False)


def read_qwen3_5_moe(hf: HfConfig) -> DecoderConfig:
    """Qwen3.5 with experts in every layer."""
    experts = read_experts(
        hf,
        range(config_require(hf, "num_hidden_layers")),
        count=256,
        chosen=8,
        width=512,
        shared_intermediate_size=config_get(hf, "shared_expert_intermediate_size", 512),
        shared_gate=True,
        aux_loss_coef=aux_loss_coef(hf),
        names=SHARED_NAMES,
    )
    # There are no dense layers, and no size of one in config.json.
    inner = config_get(hf, "moe_intermediate_size", 512)
    return _with_delta_layers(hf, keys=2, fused=False, intermediate_size=inner, experts=experts)


QWEN2_MOE = Family("qwen2_moe", "Qwen2MoeForCausalLM", read_qwen2_moe)
QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", read_qwen3_moe)
QWEN3_VL_MOE = Family("qwen3_vl_moe_text", "Qwen3VLMoeTextModel", read_qwen3_vl_moe)
QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    read_qwen3_next,
    LINEAR_ATTENTION_ROLES,
    (*LINEAR_PARTS, "in_proj_qkvz", "out_proj"),
    mtp=QWEN3_NEXT_MTP,
)
QWEN3_5 = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    read_qwen3_5,
    LINEAR_ATTENTION_ROLES,
    (*LINEAR_PARTS, "in_proj_qkv", "in_proj_z", "out_proj"),
    mtp=replace(QWEN3_NEXT_MTP, count="mtp_num_hidden_layers"),
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    read=read_qwen3_5_moe,
)
