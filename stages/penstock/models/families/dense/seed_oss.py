"""Seed-OSS: Llama with biases on q, k and v, and head_dim as its own field."""

from penstock.models.decoder_config import DecoderConfig
from penstock.models.family import Family
from penstock.models.hf_config import HfConfig, config_get, config_require, decoder_config
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Seed-OSS's config.json."""
    faults = []
    if config_get(hf, "attention_dropout", None) is None:
        faults.append("attention_dropout is 0.1, because config.json has none; write 0")
    if rate := config_get(hf, "residual_dropout", 0.1):
        faults.append(
            f"residual_dropout is {rate}; write 0 here (model.foundation overrides it), and"
            f" train.dropout.hidden: {rate} if hidden states are to be dropped"
        )
    width = config_require(hf, "hidden_size") // config_require(hf, "num_attention_heads")
    return decoder_config(
        hf,
        unsupported=faults,
        num_key_value_heads=config_get(hf, "num_key_value_heads", 8),
        # transformers derives it where it is null, and takes 128 where it is absent.
        head_dim=config_get(hf, "head_dim", width if "head_dim" in hf else 128),
        qkv_bias=bool(config_get(hf, "attention_bias", True)),
        o_bias=bool(config_get(hf, "attention_out_bias", False)),
        mlp_bias=bool(config_get(hf, "mlp_bias", False)),
    )


SEED_OSS = Family("seed_oss", "SeedOssForCausalLM", read, ROLES)
