"""Arcee: a Llama whose feed-forward networks have no gate; optional biases everywhere."""

from penstock.models.family import UNGATED_PARTS, Family
from penstock.models.hf_config import HfConfig, decoder_config, given
from penstock.models.roles import DECODER_ROLES
from penstock.models.shape import DecoderConfig

ROLES = DECODER_ROLES


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of an Arcee's config.json."""
    bias = bool(given(hf, "attention_bias", False))
    return decoder_config(
        hf,
        hidden_act="relu2",
        rms_norm_eps=given(hf, "rms_norm_eps", 1e-5),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(given(hf, "mlp_bias", False)),
    )


ARCEE = Family("arcee", "ArceeForCausalLM", read, ROLES, lora_targets=UNGATED_PARTS)
