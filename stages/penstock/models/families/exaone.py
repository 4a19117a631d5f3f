"""EXAONE: sliding-window attention in three of four layers, and no RoPE in the others; QK norm."""

from typing import Any

from penstock.models.decoder_config import DecoderConfig, ExpertNames
from penstock.models.families.layers import read_routed_experts, sparse_layers
from penstock.models.families.olmo import NAMES
from penstock.models.family import Family
from penstock.models.hf_config import (
    HfConfig,
    config_get,
    config_require,
    decoder_config,
    sliding_but_every,
)


def exaone_config(hf: HfConfig, **specific: Any) -> DecoderConfig:
    """The DecoderConfig of an EXAONE, with these values."""
    windows = sliding_but_every(hf, config_get(hf, "sliding_window_pattern", 4))
    layers = range(config_require(hf, "num_hidden_layers"))
    full = tuple(layer for layer in layers if layer not in windows["sliding_layers"])
    return decoder_config(
        hf,
        defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5},
        qk_norm=True,
        # Where no layer has a window transformers gives all of them RoPE.
        no_rope_layers=full if hf.get("sliding_window", 4096) is not None else (),
        **windows,
        **specific,
    )


def read_exaone4(hf: HfConfig) -> DecoderConfig:
    """EXAONE 4: norms of the outputs of layers, not of their inputs."""
    return exaone_config(hf, input_norms=False, output_norms=True, names=NAMES)


def read_exaone_moe(hf: HfConfig) -> DecoderConfig:
    """K-EXAONE: experts in all but the first layers, and the router of DeepSeek V3."""
    experts = read_routed_experts(
        hf,
        sparse_layers(hf, config_get(hf, "first_k_dense_replace", 1)),
        ("num_experts",),
        count=64,
        chosen=8,
        width=1024,
        shared_count="num_shared_experts",
        scale=2.5,
        names=ExpertNames(selection_bias="e_score_correction_bias"),
    )
    return exaone_config(hf, experts=experts)


EXAONE4 = Family("exaone4", "Exaone4ForCausalLM", read_exaone4)
EXAONE_MOE = Family("exaone_moe", "ExaoneMoeForCausalLM", read_exaone_moe)
