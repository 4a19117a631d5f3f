"""Cohere (Command R): parallel blocks, LayerNorm without bias, interleaved RoPE, scaled logits."""

from typing import Any

from penstock.models.decoder_config import DecoderConfig
from penstock.models.families.layers import read_experts
from penstock.models.family import Family
from penstock.models.hf_config import (
    SLIDING,
    HfConfig,
    attention_bias,
    config_get,
    config_require,
    decoder_config,
    full_rope,
    sliding_but_every,
)


def cohere_config(hf: HfConfig, *, theta: float = 10_000.0, **specific: Any) -> DecoderConfig:
    """The DecoderConfig of a Cohere of any version, with these values."""
    eps = config_get(hf, "layer_norm_eps", 1e-5)
    return decoder_config(
        hf,
        parallel_block=True,
        rope_parameters=full_rope(hf, theta=theta),
        rope_pairs="neighbours",
        logit_scale=config_get(hf, "logit_scale", 0.0625),
        **attention_bias(hf),
        **{
            "norm": "layer_unbiased",
            "rms_norm_eps": eps,
            "defaults": {"tie_word_embeddings": True},
            **specific,
        },
    )


def read_cohere(hf: HfConfig) -> DecoderConfig:
    """Cohere, the first version."""
    reasons = []
    if config_get(hf, "use_qk_norm", False):
        reasons.append("use_qk_norm is true, a LayerNorm of each head; none is computed")
    return cohere_config(hf, theta=500_000.0, not_native=reasons)


def read_cohere2(hf: HfConfig) -> DecoderConfig:
    """Cohere 2: sliding windows in three of four layers, and no RoPE in the others."""
    layers = range(config_require(hf, "num_hidden_layers"))
    windows = sliding_but_every(hf, config_get(hf, "sliding_window_pattern", 4))
    full = tuple(layer for layer in layers if layer not in windows["sliding_layers"])
    return cohere_config(hf, no_rope_layers=full, **windows)


def read_cohere2_moe(hf: HfConfig) -> DecoderConfig:
    """Cohere 2 MoE: experts after dense layers, which may have RoPE without a window."""
    reasons = []
    strategy = config_get(hf, "shared_expert_combination_strategy", "average")
    shared = config_get(hf, "num_shared_experts", 0)
    if shared and strategy != "sum":
        reasons.append(f"shared_expert_combination_strategy is {strategy!r}; sum is computed")
    dense_first = ["dense"] * config_get(hf, "first_k_dense_replace", 0)
    kinds = config_get(hf, "mlp_layer_types", dense_first)
    dense = tuple(index for index, kind in enumerate(kinds) if kind == "dense")
    windows = _sliding_layers(hf)
    # transformers gives dense layers RoPE without a window too, if none has one (`force_rope`).
    forced = dense if config_get(hf, "prefix_dense_sliding_window_pattern", 1) == 1 else ()
    layers = range(config_require(hf, "num_hidden_layers"))
    eps = hf.get("rms_norm_eps")
    norm = {} if eps is None else {"norm": "rms", "rms_norm_eps": eps}
    width = config_require(hf, "intermediate_size")
    scoring = config_get(hf, "expert_selection_fn", "softmax")
    experts = read_experts(
        hf,
        [layer for layer in layers if layer not in dense],
        count=8,
        chosen=2,
        shared_intermediate_size=width * shared,
        scoring=scoring,
        # transformers' softmax is of the chosen scores alone: that of all, divided by their sum.
        norm_topk_prob=scoring == "softmax" or bool(config_get(hf, "norm_topk_prob", True)),
    )
    return cohere_config(
        hf,
        defaults={"tie_word_embeddings": True, "head_dim": 128},
        not_native=reasons,
        intermediate_size=config_get(hf, "prefix_dense_intermediate_size", width),
        no_rope_layers=tuple(layer for layer in layers if layer not in (*windows, *forced)),
        sliding_window=hf.get("sliding_window", 4096) if windows else None,
        sliding_layers=windows,
        experts=experts,
        **norm,
    )


def _sliding_layers(hf: HfConfig) -> tuple[int, ...]:
    # Indices of the layers with a window; patterns count dense and other layers apart.
    if types := config_get(hf, "layer_types", []):
        return tuple(index for index, kind in enumerate(types) if kind == SLIDING)
    dense = config_get(hf, "first_k_dense_replace", 0)
    first = config_get(hf, "prefix_dense_sliding_window_pattern", 1)
    step = config_get(hf, "sliding_window_pattern", 4)
    sparse_layers = range(config_require(hf, "num_hidden_layers") - dense)
    return (
        *(index for index in range(dense) if (index + 1) % first),
        *(dense + layer for layer in sparse_layers if (layer + 1) % step),
    )


COHERE = Family("cohere", "CohereForCausalLM", read_cohere)
COHERE2 = Family("cohere2", "Cohere2ForCausalLM", read_cohere2)
COHERE2_MOE = Family("cohere2_moe", "Cohere2MoeForCausalLM", read_cohere2_moe)
