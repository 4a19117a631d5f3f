"""Options of adapters that the layers they are on do not support. No torch: checked before any
work, and again where adapters are added."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.adapters.match_targets import linear_layers
from penstock.adapters.names import is_expert_layer
from penstock.core.errors import ConfigError
from penstock.models.automodel.weight_map import AutoWeightMap
from penstock.models.vision.types import is_vision
from penstock.models.weights import WeightMap

if TYPE_CHECKING:
    from penstock.adapters.dora import Normed
    from penstock.adapters.lora_experts import ExpertSharing
    from penstock.adapters.peft_format import Bias

# The config field for each form of sharing LoRA parameters between experts.
SHARING_FIELDS: Mapping["ExpertSharing", str] = {
    "shared": "moe_shared_lora",
    "hybrid": "moe_hybrid_shared_lora",
}

NON_EXPERT_TARGETS_HINT = (
    "lora_target_modules without experts, such as [q_proj, k_proj, v_proj, o_proj]"
)


def require_options(
    chosen: Sequence[str],
    names: WeightMap,
    *,
    dropout: float,
    normed: "Normed",
    experts: "ExpertSharing",
    bias: "Bias",
) -> None:
    """Raise ConfigError for an option that some of the `chosen` layers, by checkpoint names, do not
    support."""
    _check_experts(chosen, names, dropout, normed, experts)
    _check_vision(chosen, dropout, bias)
    if bias != "none":
        _check_biases(chosen, names, bias)


def _check_experts(
    chosen: Sequence[str],
    names: WeightMap,
    dropout: float,
    normed: "Normed",
    sharing: "ExpertSharing",
) -> None:
    is_expert = [name for name in chosen if is_expert_layer(name)]
    experts = names.config.experts
    for field, value, neutral, why in (
        ("lora_dropout", f"{dropout:g}" if dropout else "", "0", _why_undropped(names)),
        ("use_dora", "true" if normed == "dora" else "", "false", "have no magnitudes"),
    ):
        if is_expert and value and why:
            raise ConfigError(
                f"lora.{field} is {value}, and lora.lora_target_modules names experts "
                f"({is_expert[0]} is the first), whose adapters {why}.\n"
                f"  Write {field}: {neutral}, or {NON_EXPERT_TARGETS_HINT}."
            )
    if sharing != "each" and not is_expert:
        why = "lora_target_modules names none" if experts else "the model has none"
        raise ConfigError(
            f"lora.{SHARING_FIELDS[sharing]} is true, and no expert has an adapter: {why}.\n"
            f"  Leave {SHARING_FIELDS[sharing]} out, or train experts: lora_target_modules "
            "[gate_proj, up_proj, down_proj]."
        )


def _why_undropped(names: WeightMap) -> str:
    """Why adapters of experts cannot have dropout; empty if they can."""
    experts = names.config.experts
    if experts and experts.of_images:
        return "have no dropout: experts of one kind of tokens do not know which of all these are"
    if isinstance(names, AutoWeightMap) and not names.config.outline.replaceable_experts:
        return (
            f"have no dropout: the experts of {names.config.outline.architecture} are called by "
            "code of their own, which computes with sums of weights and adapters"
        )
    return ""


def _check_vision(chosen: Sequence[str], dropout: float, bias: "Bias") -> None:
    named = [name for name in chosen if is_vision(name)]
    if not named:
        return
    why = f"lora.lora_target_modules names layers of the vision part ({named[0]} is the first)"
    if dropout:
        raise ConfigError(
            f"lora.lora_dropout is {dropout:g}, and {why}, whose tokens have no dropout.\n"
            "  Write lora_dropout: 0, or leave them out."
        )
    if bias != "none":
        raise ConfigError(
            f"lora.lora_bias is {bias}, and {why}, whose biases are frozen.\n"
            "  Write lora_bias: none, or leave them out."
        )


def _check_biases(chosen: Collection[str], names: WeightMap, bias: "Bias") -> None:
    natives = names.native_names()
    is_expert = [name for name in natives if name.endswith("_proj_bias")]
    if is_expert and bias == "all":
        raise ConfigError(
            f"lora.lora_bias is all, and experts of this model have biases ({is_expert[0]} is the "
            "first), which PEFT's format cannot name.\n  Write lora_bias: lora_only."
        )
    biased = [name for name in natives if name.endswith(".bias")]
    if bias == "lora_only":
        # Norms and routers have no adapters, and a bias of theirs is not one of an adapted layer.
        parts: dict[str, set[str]] = {}
        for layer in linear_layers(names):
            parts.setdefault(layer.of.removesuffix("weight") + "bias", set()).add(layer.name)
        biased = [name for name in biased if not parts.get(name, set()).isdisjoint(chosen)]
        if partly := [name for name in biased if not parts[name] <= {*chosen}]:
            raise ConfigError(
                f"lora.lora_bias is lora_only, and lora.lora_target_modules names only some of the "
                f"layers that {partly[0].removesuffix('.bias')} is, which has one bias.\n"
                "  Write model.merge_qkv: false, or target all of q_proj, k_proj and v_proj."
            )
    if not biased:
        raise ConfigError(
            f"lora.lora_bias is {bias}, and none of these layers has a bias in this model."
            "\n  Leave lora_bias out."
        )
