"""Bamba: Mamba-2 layers, some layers of attention with partial RoPE, and an MLP in every layer."""

from penstock.models.decoder_config import DecoderConfig, TensorNames
from penstock.models.families.hybrid.fields import unsupported_activation
from penstock.models.families.hybrid.mamba import mamba_config
from penstock.models.family import LINEAR_PARTS, Family
from penstock.models.hf_config import (
    HfConfig,
    config_get,
    config_require,
    decoder_config,
    rope_parameters,
)
from penstock.models.tp_roles import MAMBA_ROLES

ROLES = MAMBA_ROLES
NAMES = TensorNames(
    norm="final_layernorm",
    mlp_norm="pre_ff_layernorm",
    gate_proj="feed_forward.gate_proj",
    up_proj="feed_forward.up_proj",
    down_proj="feed_forward.down_proj",
)


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Bamba's config.json."""
    attention = config_get(hf, "attn_layer_indices", ())
    layers = range(config_require(hf, "num_hidden_layers"))
    mamba = tuple(layer for layer in layers if layer not in attention)
    bias = bool(config_get(hf, "attention_bias", False))
    return decoder_config(
        hf,
        unsupported=_unsupported(hf),
        not_native=unsupported_activation(hf),
        num_key_value_heads=config_get(hf, "num_key_value_heads", 8),
        rms_norm_eps=config_get(hf, "rms_norm_eps", 1e-5),
        rope_parameters=rope_parameters(hf, share=0.5),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(config_get(hf, "mlp_bias", False)),
        linear=mamba_config(hf) if mamba else None,
        linear_layers=mamba,
        names=NAMES,
    )


def _unsupported(hf: HfConfig) -> list[str]:
    reasons: list[str] = []
    if coefficient := config_get(hf, "z_loss_coefficient", 0.0):
        reasons.append(
            f"z_loss_coefficient is {coefficient}; write 0 here (model.foundation overrides it), "
            f"and train.z_loss_coef: {coefficient} if that loss is wanted"
        )
    if (share := config_get(hf, "partial_rotary_factor", 0.5)) != 0.5:
        reasons.append(
            f"partial_rotary_factor is {share}; transformers reads it in rope_parameters alone"
        )
    return reasons


BAMBA = Family(
    "bamba", "BambaForCausalLM", read, ROLES, lora_targets=(*LINEAR_PARTS, "in_proj", "out_proj")
)
