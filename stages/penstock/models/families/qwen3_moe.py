"""Qwen3 with experts: softmax over all of them, the best few; no shared ones."""

from penstock.models.decoder_config import DecoderConfig, ExpertsConfig
from penstock.models.family import Family
from penstock.models.hf_config import (
    HfConfig,
    balance_of,
    decoder_config,
    given,
    required,
    sliding_everywhere,
    window_if_used,
)
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Qwen3-MoE's config.json."""
    bias = bool(given(hf, "attention_bias", False))
    return decoder_config(
        hf,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        experts=_experts(hf),
        **sliding_everywhere(hf, window_if_used(hf)),
    )


def _experts(hf: HfConfig) -> ExpertsConfig | None:
    count = given(hf, "num_experts", given(hf, "num_local_experts", 128))
    step, dense = given(hf, "decoder_sparse_step", 1), given(hf, "mlp_only_layers", [])
    layers = tuple(
        layer
        for layer in range(required(hf, "num_hidden_layers"))
        if layer not in dense and (layer + 1) % step == 0
    )
    if not count or not layers:
        return None
    return ExpertsConfig(
        layers=layers,
        num_experts=count,
        experts_per_token=given(hf, "num_experts_per_tok", 8),
        width=given(hf, "moe_intermediate_size", 768),
        normalised=bool(given(hf, "norm_topk_prob", False)),
        balance=balance_of(hf),
    )


QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", read, ROLES)
