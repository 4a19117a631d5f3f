"""StableLM: LayerNorm, partial RoPE, gated MLPs; optional biases on q, k and v only."""

from penstock.models.decoder_config import DecoderConfig
from penstock.models.family import Family
from penstock.models.hf_config import (
    HfConfig,
    config_get,
    config_require,
    decoder_config,
    rope_parameters,
)
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a StableLM's config.json."""
    reasons = [
        f"{name} is true; StableLM without it is computed"
        for name in ("qk_layernorm", "use_parallel_residual")
        if config_get(hf, name, False)
    ]
    faults = []
    if dropout := config_get(hf, "hidden_dropout", 0.0):
        faults.append(
            f"hidden_dropout is {dropout}; write 0 here (model.foundation overrides it), and"
            " train.dropout if something is to be dropped"
        )
    width = config_require(hf, "hidden_size") // config_require(hf, "num_attention_heads")
    if (head_dim := config_get(hf, "head_dim", width)) != width:
        faults.append(f"head_dim is {head_dim}; hidden_size / num_attention_heads is computed")
    return decoder_config(
        hf,
        unsupported=faults,
        not_native=reasons,
        norm="layer",
        rms_norm_eps=config_get(hf, "layer_norm_eps", 1e-5),
        head_dim=width,
        num_key_value_heads=config_get(hf, "num_key_value_heads", 32),
        rope_parameters=rope_parameters(hf, share=0.25),
        qkv_bias=bool(config_get(hf, "use_qkv_bias", False)),
    )


STABLELM = Family("stablelm", "StableLmForCausalLM", read, ROLES)
