"""Cohere 2 MoE: Cohere 2 with experts, after dense layers that may have RoPE without a window."""

from penstock.models.decoder_config import DecoderConfig, ExpertsConfig
from penstock.models.families.parallel.cohere import cohere_config
from penstock.models.family import Family
from penstock.models.hf_config import SLIDING, HfConfig, config_get, config_require
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Cohere 2 MoE's config.json."""
    reasons = []
    strategy = config_get(hf, "shared_expert_combination_strategy", "average")
    if config_get(hf, "num_shared_experts", 0) and strategy != "sum":
        reasons.append(f"shared_expert_combination_strategy is {strategy!r}; sum is computed")
    dense, windows = _dense_layers(hf), _sliding_layers(hf)
    forced = dense if config_get(hf, "prefix_dense_sliding_window_pattern", 1) == 1 else ()
    layers = range(config_require(hf, "num_hidden_layers"))
    eps = hf.get("rms_norm_eps")
    norm = {} if eps is None else {"norm": "rms", "rms_norm_eps": eps}
    inner = config_require(hf, "intermediate_size")
    return cohere_config(
        hf,
        theta=10_000.0,
        not_native=reasons,
        head_dim=config_get(hf, "head_dim", 128),
        intermediate_size=config_get(hf, "prefix_dense_intermediate_size", inner),
        no_rope_layers=tuple(layer for layer in layers if layer not in (*windows, *forced)),
        sliding_window=hf.get("sliding_window", 4096) if windows else None,
        sliding_layers=windows,
        experts=_experts(hf, tuple(layer for layer in layers if layer not in dense)),
        **norm,
    )


def _dense_layers(hf: HfConfig) -> tuple[int, ...]:
    kinds = config_get(
        hf, "mlp_layer_types", ["dense"] * config_get(hf, "first_k_dense_replace", 0)
    )
    return tuple(index for index, kind in enumerate(kinds) if kind == "dense")


def _sliding_layers(hf: HfConfig) -> tuple[int, ...]:
    """Indices of the layers with a window; patterns count dense and other layers apart."""
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


def _experts(hf: HfConfig, layers: tuple[int, ...]) -> ExpertsConfig | None:
    width = config_require(hf, "intermediate_size")
    scoring = config_get(hf, "expert_selection_fn", "softmax")
    if not layers:
        return None
    return ExpertsConfig(
        layers=layers,
        num_experts=config_get(hf, "num_experts", 8),
        experts_per_token=config_get(hf, "num_experts_per_tok", 2),
        intermediate_size=width,
        shared_intermediate_size=width * config_get(hf, "num_shared_experts", 0),
        scoring=scoring,
        norm_topk_prob=scoring == "softmax" or bool(config_get(hf, "norm_topk_prob", True)),
    )


COHERE2_MOE = Family("cohere2_moe", "Cohere2MoeForCausalLM", read, ROLES)
