"""Gemma 2: Gemma with norms of the outputs of layers as well, sliding-window attention in every
second layer, and soft caps of attention scores and logits."""

from penstock.models.decoder_config import DecoderConfig, TensorNames
from penstock.models.families.gemma.gemma import ROLES, gemma_config
from penstock.models.family import Family
from penstock.models.hf_config import HfConfig, config_get, config_require, sliding

NAMES = TensorNames(
    mlp_norm="pre_feedforward_layernorm",
    attention_output_norm="post_attention_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
)


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Gemma 2's config.json."""
    return gemma2_config(hf, output_norms=True)


def gemma2_config(hf: HfConfig, *, output_norms: bool) -> DecoderConfig:
    """The DecoderConfig of a Gemma 2, with or without norms of outputs."""
    num_layers = config_require(hf, "num_hidden_layers")
    return gemma_config(
        hf,
        hidden_act="hidden_activation",
        output_norms=output_norms,
        # Not of head_dim: some sizes have other heads than this scalar says.
        attention_scale=config_get(hf, "query_pre_attn_scalar", 256) ** -0.5,
        attention_soft_cap=hf.get("attn_logit_softcapping", 50.0),
        logit_soft_cap=hf.get("final_logit_softcapping", 30.0),
        names=NAMES,
        **sliding(hf, hf.get("sliding_window", 4096), range(0, num_layers, 2)),
    )


GEMMA2 = Family("gemma2", "Gemma2ForCausalLM", read, ROLES)
