"""HyperCLOVA X: Granite with norms of the outputs of layers as well."""

from penstock.models.decoder_config import DecoderConfig, TensorNames
from penstock.models.family import Family
from penstock.models.hf_config import HfConfig, config_get, config_require, decoder_config
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES
NAMES = TensorNames(attention_output_norm="post_norm1", mlp_output_norm="post_norm2")


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a HyperCLOVA X's config.json."""
    width = config_require(hf, "hidden_size") // config_require(hf, "num_attention_heads")
    head_dim = config_get(hf, "head_dim", width)
    bias = bool(config_get(hf, "attention_bias", False))
    return decoder_config(
        hf,
        output_norms=bool(config_get(hf, "use_post_norm", True)),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(config_get(hf, "mlp_bias", False)),
        embedding_scale=config_get(hf, "embedding_multiplier", 1.0),
        residual_scale=config_get(hf, "residual_multiplier", 1.0),
        attention_scale=config_get(hf, "attention_multiplier", head_dim**-0.5),
        # A factor, where Granite's field of this name is a divisor.
        logit_scale=config_get(hf, "logits_scaling", 1.0),
        names=NAMES,
    )


HYPERCLOVAX = Family("hyperclovax", "HyperCLOVAXForCausalLM", read, ROLES)
