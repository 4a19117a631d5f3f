"""Nemotron: LayerNorm that multiplies by 1 + its weight, a share of each head turned, feed-forward
networks without a gate, optional biases."""

from penstock.models.family import UNGATED_PARTS, Family
from penstock.models.hf_config import HfConfig, decoder_config, given, rope_parameters
from penstock.models.roles import DECODER_ROLES
from penstock.models.shape import DecoderConfig

ROLES = DECODER_ROLES


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Nemotron's config.json."""
    bias = bool(given(hf, "attention_bias", False))
    return decoder_config(
        hf,
        hidden_act="relu2",
        norm="layer_1p",
        rms_norm_eps=given(hf, "norm_eps", 1e-5),
        rope_parameters=rope_parameters(hf, share=0.5),
        initializer_range=given(hf, "initializer_range", 0.0134),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(given(hf, "mlp_bias", False)),
    )


NEMOTRON = Family("nemotron", "NemotronForCausalLM", read, ROLES, lora_targets=UNGATED_PARTS)
