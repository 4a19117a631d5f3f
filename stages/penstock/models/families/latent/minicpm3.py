"""MiniCPM 3: latent attention without experts; scaled embeddings, residuals and logits."""

import math

from penstock.models.decoder_config import DecoderConfig
from penstock.models.families.latent.fields import (
    LORA_TARGETS,
    ROLES,
    latent_attention,
    unsupported_attention,
)
from penstock.models.family import Family
from penstock.models.hf_config import HfConfig, config_get, config_require, decoder_config


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a MiniCPM 3's config.json."""
    width, layers = (config_require(hf, name) for name in ("hidden_size", "num_hidden_layers"))
    # Null means no scaling; a field that is left out has its default.
    depth, base = hf.get("scale_depth", 1.4), hf.get("dim_model_base", 256)
    values = width // config_require(hf, "num_attention_heads")
    return decoder_config(
        hf,
        unsupported=unsupported_attention(hf),
        rms_norm_eps=config_get(hf, "rms_norm_eps", 1e-5),
        tie_word_embeddings=bool(config_get(hf, "tie_word_embeddings", True)),
        initializer_range=config_get(hf, "initializer_range", 0.1),
        **latent_attention(hf, ranks=(768, 256), head=(64, 32, values)),
        mlp_bias=bool(config_get(hf, "mlp_bias", False)),
        embedding_scale=config_get(hf, "scale_emb", 12),
        rounds_embedding_scale=True,
        # Hu et al. 2024, "MiniCPM": outputs of layers shrink with the root of their number.
        residual_scale=1.0 if depth is None else depth / math.sqrt(layers),
        logit_scale=1.0 if base is None else base / width,
    )


MINICPM3 = Family("minicpm3", "MiniCPM3ForCausalLM", read, ROLES, lora_targets=LORA_TARGETS)
