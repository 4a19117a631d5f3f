"""Mamba-2 layers, also of Granite 4; Bamba, and Nemotron-H, whose layers have one part each."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from penstock.core.errors import ConfigError
from penstock.models.decoder_config import DecoderConfig, ExpertNames, TensorNames
from penstock.models.families.layers import NO_ROPE, read_routed_experts, unsupported_activation
from penstock.models.family import LINEAR_PARTS, UNGATED_PARTS, Family
from penstock.models.hf_config import (
    FULL,
    LINEAR,
    OLD_LAYER_TYPES,
    HfConfig,
    attention_bias,
    config_get,
    config_require,
    decoder_config,
    mlp_bias,
    rope_parameters,
)
from penstock.models.mamba2_config import Mamba2Config
from penstock.models.state_layer_config import InitialValues
from penstock.models.tp_roles import MAMBA_ROLES

BAMBA_NAMES = TensorNames(
    norm="final_layernorm",
    mlp_norm="pre_ff_layernorm",
    gate_proj="feed_forward.gate_proj",
    up_proj="feed_forward.up_proj",
    down_proj="feed_forward.down_proj",
)
NEMOTRON_NAMES = TensorNames(
    backbone="backbone",
    module_backbone="model",
    embed="embeddings",
    norm="norm_f",
    attention="mixer",
    attention_norm="norm",
    mlp_norm="norm",
    o_proj="mixer.o_proj",
    up_proj="mixer.up_proj",
    down_proj="mixer.down_proj",
)

# Fields of Mamba-2 layers: their names in config.json, and their defaults.
GRANITE_FIELDS = {
    "groups": ("mamba_n_groups", 1),
    "state_dim": ("mamba_d_state", 256),
    "kernel": ("mamba_d_conv", 4),
    "conv_bias": ("mamba_conv_bias", True),
    "bias": ("mamba_proj_bias", False),
}
NEMOTRON_FIELDS = {
    "num_heads": ("mamba_num_heads", 128),
    "head_dim": ("mamba_head_dim", 64),
    "groups": ("n_groups", 8),
    "state_dim": ("ssm_state_size", 128),
    "kernel": ("conv_kernel", 4),
    "conv_bias": ("use_conv_bias", True),
    "bias": ("use_bias", False),
}

MLP, EXPERTS = "mlp", "moe"
# The kinds of layers in `hybrid_override_pattern`, as files of Nemotron-H say.
PATTERN: Mapping[str, str] = {"M": LINEAR, "*": FULL, "-": MLP, "E": EXPERTS}


def mamba_config(hf: HfConfig) -> Mamba2Config:
    """Mamba-2 layers in the fields of Granite 4 and Bamba."""
    heads = config_get(hf, "mamba_n_heads", 128)
    features = config_get(hf, "mamba_expand", 2) * config_require(hf, "hidden_size")
    head_dim = config_get(hf, "mamba_d_head", "auto")
    if head_dim == "auto":
        head_dim = features // heads
    if heads * head_dim != features:
        raise ConfigError(
            f"the model's mamba_n_heads ({heads}) heads of mamba_d_head ({head_dim}) features are "
            f"not mamba_expand times its hidden_size ({features}). Correct the config.json that "
            "model.config_path names."
        )
    # transformers writes infinity as {"__float__": "Infinity"}.
    least, most = (
        float(limit["__float__"] if isinstance(limit, dict) else limit)
        for limit in config_get(hf, "time_step_limit", (0.0, math.inf))
    )
    return Mamba2Config(
        num_heads=heads,
        head_dim=head_dim,
        **_read_fields(hf, GRANITE_FIELDS),
        min_step=least,
        max_step=most,
    )


def _read_fields(hf: HfConfig, fields: Mapping[str, tuple[str, int]]) -> dict[str, Any]:
    values = {name: config_get(hf, field, default) for name, (field, default) in fields.items()}
    bias, conv_bias = bool(values.pop("bias")), bool(values.pop("conv_bias"))
    return {**values, "conv_bias": conv_bias, "in_bias": bias, "out_bias": bias}


def read_bamba(hf: HfConfig) -> DecoderConfig:
    """Bamba: some layers of attention with partial RoPE, and an MLP in every layer."""
    attention = config_get(hf, "attn_layer_indices", ())
    layers = range(config_require(hf, "num_hidden_layers"))
    mamba = tuple(layer for layer in layers if layer not in attention)
    faults = []
    if coefficient := config_get(hf, "z_loss_coefficient", 0.0):
        faults.append(
            f"z_loss_coefficient is {coefficient}; write 0 here (model.foundation overrides it), "
            f"and train.z_loss_coef: {coefficient} if that loss is wanted"
        )
    if (share := config_get(hf, "partial_rotary_factor", 0.5)) != 0.5:
        faults.append(
            f"partial_rotary_factor is {share}; transformers reads it in rope_parameters alone"
        )
    return decoder_config(
        hf,
        unsupported=faults,
        not_native=unsupported_activation(hf),
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
        rope_parameters=rope_parameters(hf, share=0.5),
        linear=mamba_config(hf) if mamba else None,
        linear_layers=mamba,
        names=BAMBA_NAMES,
        **attention_bias(hf),
        **mlp_bias(hf),
    )


@dataclass(frozen=True)
class NemotronMamba2Config(Mamba2Config):
    """Mamba-2 by the names of Nemotron-H."""

    module = "mixer"
    heads_field = "mamba_num_heads"
    fields: ClassVar[Mapping[str, str]] = {
        "num_heads": "mamba_num_heads",
        "head_dim": "mamba_head_dim",
        "groups": "n_groups",
        "state_dim": "ssm_state_size",
        "kernel": "conv_kernel",
    }


def read_nemotron_h(hf: HfConfig) -> DecoderConfig:
    """Nemotron-H: each layer is Mamba-2, attention without RoPE, an MLP without a gate, or experts
    without one, which may be latent."""
    types = _layer_types(hf)

    def layers(*kinds: str) -> tuple[int, ...]:
        return tuple(index for index, kind in enumerate(types) if kind in kinds)

    reasons = [*unsupported_activation(hf, "mamba_hidden_act")]
    if config_get(hf, "tie_word_embeddings", False):
        reasons.append("tie_word_embeddings is true, and embedding and head are separate")
    experts = read_routed_experts(
        hf,
        layers(EXPERTS),
        count=8,
        chosen=2,
        width=7688,
        scale=1.0,
    )
    if experts:
        experts = replace(
            experts,
            # transformers has shared experts whatever n_shared_experts is.
            shared_intermediate_size=config_get(hf, "moe_shared_expert_intermediate_size", 7688),
            latent_size=config_get(hf, "moe_latent_size", 0),
            names=ExpertNames(block="mixer", module="mixer"),
        )
    return decoder_config(
        hf,
        num_hidden_layers=len(types),
        not_native=reasons,
        named={"hidden_act": "mlp_hidden_act"},
        hidden_act="relu2",
        gated=False,
        defaults={"num_key_value_heads": 8, "head_dim": 128},
        rms_norm_eps=config_get(hf, "layer_norm_epsilon", 1e-5),
        rope_parameters=NO_ROPE,
        no_rope_layers=layers(FULL),
        linear=_nemotron_mamba(hf) if layers(LINEAR) else None,
        linear_layers=layers(LINEAR),
        without_mixer=layers(MLP, EXPERTS),
        without_mlp=layers(LINEAR, FULL),
        experts=experts,
        names=NEMOTRON_NAMES,
        **mlp_bias(hf),
    )


def _layer_types(hf: HfConfig) -> Sequence[str]:
    types: Sequence[str] = hf.get("layers_block_type") or hf.get("layer_types") or ()
    pattern: str = config_get(hf, "hybrid_override_pattern", "")
    types = types or [PATTERN.get(letter, letter) for letter in pattern]
    types = types or [LINEAR, EXPERTS, FULL, MLP]
    kinds = [OLD_LAYER_TYPES.get(kind, kind) for kind in types]
    if unknown := sorted(set(kinds) - set(PATTERN.values())):
        raise ConfigError(
            f"the model's layers_block_type (config.json) names {', '.join(unknown)}; a layer is "
            f"{', '.join(PATTERN.values())}. Correct the config.json that model.config_path names."
        )
    return kinds


def _nemotron_mamba(hf: HfConfig) -> Mamba2Config:
    least, most = config_get(hf, "time_step_min", 0.001), config_get(hf, "time_step_max", 0.1)
    return NemotronMamba2Config(
        **_read_fields(hf, NEMOTRON_FIELDS),
        # Not max_step: transformers clamps steps from below, and only draws initial ones up to it.
        min_step=least,
        initial_step=InitialValues("softplus_log_uniform", min(least, most), max(least, most)),
    )


BAMBA = Family(
    "bamba", "BambaForCausalLM", read_bamba, MAMBA_ROLES, (*LINEAR_PARTS, "in_proj", "out_proj")
)
# PEFT has no adapters of out_proj in this family: Mamba's kernels read its weight apart.
NEMOTRON_H = Family(
    "nemotron_h", "NemotronHForCausalLM", read_nemotron_h, MAMBA_ROLES, (*UNGATED_PARTS, "in_proj")
)
