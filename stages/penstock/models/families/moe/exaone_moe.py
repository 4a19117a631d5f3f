"""EXAONE MoE (K-EXAONE): grouped sigmoid router with a selection bias and shared experts; the first
layers are dense; attention as in EXAONE 4, with norms of the inputs of layers."""

from penstock.models.decoder_config import DecoderConfig, ExpertNames, ExpertsConfig
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
NAMES = ExpertNames(selection_bias="e_score_correction_bias")


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of an EXAONE MoE's config.json."""
    layers = range(config_require(hf, "num_hidden_layers"))
    window, step = hf.get("sliding_window", 4096), config_get(hf, "sliding_window_pattern", 4)
    windows = sliding(hf, window, (layer for layer in layers if (layer + 1) % step))
    full = () if window is None else tuple(set(layers) - {*windows["sliding_layers"]})
    return decoder_config(
        hf,
        num_key_value_heads=config_get(hf, "num_key_value_heads", 32),
        rms_norm_eps=config_get(hf, "rms_norm_eps", 1e-5),
        qk_norm=True,
        no_rope_layers=tuple(sorted(full)),
        experts=_experts(hf),
        **windows,
    )


def sparse_layers(hf: HfConfig, dense: int) -> tuple[int, ...]:
    """Indices of the MoE layers: those in `mlp_layer_types`, or all but the first `dense`."""
    count = config_require(hf, "num_hidden_layers")
    pattern = ["dense"] * dense + ["sparse"] * (count - dense)
    kinds = config_get(hf, "mlp_layer_types", pattern)[:count]
    return tuple(index for index, kind in enumerate(kinds) if kind == "sparse")


def _experts(hf: HfConfig) -> ExpertsConfig | None:
    count = config_get(hf, "num_experts", 64)
    width = config_get(hf, "moe_intermediate_size", 1024)
    layers = sparse_layers(hf, config_get(hf, "first_k_dense_replace", 1))
    if not layers:
        return None
    return ExpertsConfig(
        layers=layers,
        num_experts=count,
        experts_per_token=config_get(hf, "num_experts_per_tok", 8),
        intermediate_size=width,
        shared_intermediate_size=width * config_get(hf, "num_shared_experts", 1),
        scoring="sigmoid",
        norm_topk_prob=bool(config_get(hf, "norm_topk_prob", True)),
        num_groups=config_get(hf, "n_group", 1),
        groups_per_token=config_get(hf, "topk_group", 1),
        scale=config_get(hf, "routed_scaling_factor", 2.5),
        selection_bias=(count,),
        names=NAMES,
    )


EXAONE_MOE = Family("exaone_moe", "ExaoneMoeForCausalLM", read, ROLES)
