"""Granite 4: Granite with Mamba-2 layers, with RoPE or without, and an MLP in every layer beside
which there may be experts."""

from penstock.models.decoder_config import DecoderConfig, ExpertNames, ExpertsConfig, TensorNames
from penstock.models.families.dense.granite import granite_config
from penstock.models.families.hybrid.fields import layers_of_kind, unsupported_activation
from penstock.models.families.hybrid.mamba import NO_ROPE, mamba_config
from penstock.models.family import FUSED_GATE_UP_PARTS, Family
from penstock.models.hf_config import (
    LINEAR,
    HfConfig,
    aux_loss_coef,
    config_get,
    config_require,
    require_full_rotary,
    rope_parameters,
)
from penstock.models.tp_roles import MAMBA_ROLES

ROLES = MAMBA_ROLES
NAMES = TensorNames(gate_up_proj="shared_mlp.input_linear", down_proj="shared_mlp.output_linear")
EXPERT_NAMES = ExpertNames(
    block="block_sparse_moe",
    router="router.layer",
    gate_up_stack="input_linear.weight",
    down_stack="output_linear.weight",
    shared="shared_mlp",
    shared_is_beside=True,
)


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a GraniteMoeHybrid's config.json."""
    every = tuple(range(config_require(hf, "num_hidden_layers")))
    mamba = layers_of_kind(hf, LINEAR, hf.get("layers_block_type") or [LINEAR] * len(every))
    has_rope = config_get(hf, "position_embedding_type", None) == "rope"
    rope = require_full_rotary(rope_parameters(hf)) if has_rope else NO_ROPE
    return granite_config(
        hf,
        not_native=unsupported_activation(hf),
        intermediate_size=config_get(hf, "shared_intermediate_size", 1024),
        mlp_bias=False,
        fused_gate_up=True,
        rope_parameters=rope,
        no_rope_layers=() if has_rope else every,
        linear=mamba_config(hf) if mamba else None,
        linear_layers=mamba,
        experts=_experts(hf, every),
        names=NAMES,
    )


def _experts(hf: HfConfig, layers: tuple[int, ...]) -> ExpertsConfig | None:
    count = config_get(hf, "num_local_experts", 8)
    if not count:
        return None
    return ExpertsConfig(
        layers=layers,
        num_experts=count,
        experts_per_token=config_get(hf, "num_experts_per_tok", 2),
        intermediate_size=config_require(hf, "intermediate_size"),
        shared_intermediate_size=config_get(hf, "shared_intermediate_size", 1024),
        aux_loss_coef=aux_loss_coef(hf),
        names=EXPERT_NAMES,
    )


GRANITEMOEHYBRID = Family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    read,
    ROLES,
    lora_targets=(*FUSED_GATE_UP_PARTS, "in_proj", "out_proj"),
)
