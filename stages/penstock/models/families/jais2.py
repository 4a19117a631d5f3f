"""Jais 2: LayerNorm, whole heads turned, feed-forward networks without a gate, optional biases."""

from penstock.models.family import UNGATED_PARTS, Family
from penstock.models.hf_config import HfConfig, decoder_config, given
from penstock.models.roles import DECODER_ROLES
from penstock.models.shape import DecoderConfig

ROLES = DECODER_ROLES


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Jais 2's config.json."""
    bias = bool(given(hf, "attention_bias", True))
    return decoder_config(
        hf,
        hidden_act="relu2",
        norm="layer",
        rms_norm_eps=given(hf, "layer_norm_eps", 1e-5),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(given(hf, "mlp_bias", True)),
    )


JAIS2 = Family("jais2", "Jais2ForCausalLM", read, ROLES, lora_targets=UNGATED_PARTS)
