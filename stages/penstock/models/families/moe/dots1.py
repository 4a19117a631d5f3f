"""dots.llm1: grouped sigmoid router with a selection bias, shared experts, QK norm by head."""

from penstock.models.decoder_config import DecoderConfig, ExpertsConfig
from penstock.models.family import Family
from penstock.models.hf_config import (
    HfConfig,
    config_get,
    config_require,
    decoder_config,
    sliding,
)
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a dots1's config.json."""
    bias = bool(config_get(hf, "attention_bias", False))
    num_layers = config_require(hf, "num_hidden_layers")
    windows = range(config_get(hf, "max_window_layers", 62), num_layers)
    return decoder_config(
        hf,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        experts=_experts(hf, num_layers),
        **sliding(hf, hf.get("sliding_window", 4096), windows),
    )


def _experts(hf: HfConfig, num_layers: int) -> ExpertsConfig | None:
    layers = tuple(range(config_get(hf, "first_k_dense_replace", 0), num_layers))
    if not layers:
        return None
    count = config_require(hf, "n_routed_experts")
    width = config_get(hf, "moe_intermediate_size", 1408)
    return ExpertsConfig(
        layers=layers,
        num_experts=count,
        experts_per_token=config_require(hf, "num_experts_per_tok"),
        intermediate_size=width,
        shared_intermediate_size=width * config_require(hf, "n_shared_experts"),
        scoring="sigmoid",
        norm_topk_prob=bool(config_get(hf, "norm_topk_prob", False)),
        num_groups=config_get(hf, "n_group", 1),
        groups_per_token=config_get(hf, "topk_group", 1),
        scale=config_get(hf, "routed_scaling_factor", 1.0),
        selection_bias=(count,),
    )


DOTS1 = Family("dots1", "Dots1ForCausalLM", read, ROLES)
