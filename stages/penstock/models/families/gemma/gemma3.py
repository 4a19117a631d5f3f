"""Gemma 3, text: Gemma 2 with QK norm instead of soft caps, and full attention in every sixth
layer, which has its own RoPE."""

from penstock.models.decoder_config import DecoderConfig
from penstock.models.families.gemma.gemma import ROLES, gemma_config
from penstock.models.families.gemma.gemma2 import NAMES
from penstock.models.family import Family
from penstock.models.hf_config import HfConfig, config_get, config_require, rope_by_layer, sliding


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Gemma 3's text config."""
    reasons = []
    if (cap := config_get(hf, "attn_logit_softcapping", None)) is not None:
        reasons.append(f"attn_logit_softcapping is {cap}; scores without a cap are computed")
    step = config_get(hf, "sliding_window_pattern", 6)
    layers = range(config_require(hf, "num_hidden_layers"))
    return gemma_config(
        hf,
        not_native=reasons,
        hidden_act="hidden_activation",
        output_norms=True,
        qk_norm=True,
        attention_scale=config_get(hf, "query_pre_attn_scalar", 256) ** -0.5,
        logit_soft_cap=config_get(hf, "final_logit_softcapping", None),
        names=NAMES,
        **rope_by_layer(hf, theta=1e6, sliding_theta=1e4, sliding_field="rope_local_base_freq"),
        **sliding(
            hf, hf.get("sliding_window", 4096), (layer for layer in layers if (layer + 1) % step)
        ),
    )


GEMMA3 = Family("gemma3_text", "Gemma3ForCausalLM", read, ROLES)
