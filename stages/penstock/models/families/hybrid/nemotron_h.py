"""Nemotron-H: each layer is Mamba-2, attention without RoPE, an MLP without a gate, or experts
without one, which may be latent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.core.errors import ConfigError
from penstock.models.decoder_config import DecoderConfig, ExpertNames, ExpertsConfig, TensorNames
from penstock.models.families.hybrid.fields import unsupported_activation
from penstock.models.families.hybrid.mamba import NO_ROPE
from penstock.models.families.latent.fields import experts, groups
from penstock.models.family import UNGATED_PARTS, Family
from penstock.models.hf_config import (
    FULL,
    LINEAR,
    OLD_LAYER_TYPES,
    HfConfig,
    config_get,
    decoder_config,
)
from penstock.models.mamba2_config import Mamba2Config
from penstock.models.state_layer_config import InitialValues
from penstock.models.tp_roles import MAMBA_ROLES

ROLES = MAMBA_ROLES
NAMES = TensorNames(
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
EXPERT_NAMES = ExpertNames(block="mixer", module="mixer")

MLP, EXPERTS = "mlp", "moe"
PATTERN: Mapping[str, str] = {"M": LINEAR, "*": FULL, "-": MLP, "E": EXPERTS}
"""The kinds of layers in `hybrid_override_pattern`, as files of Nemotron-H say."""


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a NemotronH's config.json."""
    types = layer_types(hf)

    def layers(*kinds: str) -> tuple[int, ...]:
        return tuple(index for index, kind in enumerate(types) if kind in kinds)

    return decoder_config(
        hf,
        num_hidden_layers=len(types),
        not_native=(*unsupported_activation(hf, "mamba_hidden_act"), *_not_native(hf)),
        named={"hidden_act": "mlp_hidden_act"},
        hidden_act="relu2",
        gated=False,
        num_key_value_heads=config_get(hf, "num_key_value_heads", 8),
        head_dim=config_get(hf, "head_dim", 128),
        rms_norm_eps=config_get(hf, "layer_norm_epsilon", 1e-5),
        mlp_bias=bool(config_get(hf, "mlp_bias", False)),
        rope_parameters=NO_ROPE,
        no_rope_layers=layers(FULL),
        linear=_mamba(hf) if layers(LINEAR) else None,
        linear_layers=layers(LINEAR),
        without_mixer=layers(MLP, EXPERTS),
        without_mlp=layers(LINEAR, FULL),
        experts=_experts(hf, layers(EXPERTS)),
        names=NAMES,
    )


def _experts(hf: HfConfig, layers: tuple[int, ...]) -> ExpertsConfig | None:
    """Transformers has shared experts whatever `n_shared_experts` is."""
    experts_config = experts(
        hf,
        layers,
        count=8,
        chosen=2,
        width=7688,
        shared=1,
        scoring="sigmoid",
        normalized=bool(config_get(hf, "norm_topk_prob", True)),
        groups=groups(hf, 1, 1),
        scale=1.0,
    )
    return experts_config and replace(
        experts_config,
        shared_intermediate_size=config_get(hf, "moe_shared_expert_intermediate_size", 7688),
        latent_size=config_get(hf, "moe_latent_size", 0),
        names=EXPERT_NAMES,
    )


def layer_types(hf: HfConfig) -> Sequence[str]:
    """The kind of each layer."""
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


FIELDS: Mapping[str, str] = {
    "num_heads": "mamba_num_heads",
    "head_dim": "mamba_head_dim",
    "groups": "n_groups",
    "state_dim": "ssm_state_size",
    "kernel": "conv_kernel",
}
"""Names in config.json."""


@dataclass(frozen=True)
class NemotronMamba2Config(Mamba2Config):
    """Mamba-2 by the names of Nemotron-H."""

    module = "mixer"
    heads_field = FIELDS["num_heads"]
    fields = FIELDS


def _mamba(hf: HfConfig) -> Mamba2Config:
    bias = bool(config_get(hf, "use_bias", False))
    return NemotronMamba2Config(
        num_heads=config_get(hf, "mamba_num_heads", 128),
        head_dim=config_get(hf, "mamba_head_dim", 64),
        groups=config_get(hf, "n_groups", 8),
        state_dim=config_get(hf, "ssm_state_size", 128),
        kernel=config_get(hf, "conv_kernel", 4),
        conv_bias=bool(config_get(hf, "use_conv_bias", True)),
        in_bias=bias,
        out_bias=bias,
        min_step=config_get(hf, "time_step_min", 0.001),
        initial_step=_initial_steps(hf),
    )


def _initial_steps(hf: HfConfig) -> InitialValues:
    ends = config_get(hf, "time_step_min", 0.001), config_get(hf, "time_step_max", 0.1)
    return InitialValues("softplus_log_uniform", min(ends), max(ends))


def _not_native(hf: HfConfig) -> tuple[str, ...]:
    if config_get(hf, "tie_word_embeddings", False):
        return ("tie_word_embeddings is true, and embedding and head are separate",)
    return ()


# PEFT has no adapters of out_proj in this family: Mamba's kernels read its weight apart.
NEMOTRON_H = Family(
    "nemotron_h", "NemotronHForCausalLM", read, ROLES, lora_targets=(*UNGATED_PARTS, "in_proj")
)
