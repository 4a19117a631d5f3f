"""Converts adapters to and from the PEFT library's format."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from penstock.adapters.names import MAGNITUDE, parse_lora_name
from penstock.adapters.scaling import Scaling, lora_scaling

PREFIX = "base_model.model."

LINEAR = ("lora_A.weight", "lora_B.weight")
EMBEDDED = ("lora_embedding_A", "lora_embedding_B")
NORMS = "lora_magnitude_vector"
"""PEFT's name suffixes: A and B of a linear layer, A and B of an embedding, and DoRA magnitudes of
either."""

Bias = Literal["none", "all", "lora_only"]
"""Which biases of the base model are trained as well: all, or those of adapted layers."""


# The tensors in which transformers stores the experts of a layer.
FUSED_EXPERTS = ("gate_up_proj", "down_proj")


@dataclass(frozen=True)
class AdaptedExperts:
    """Which experts of a model have adapters: in each layer either all or none, on every matrix."""

    parts: Collection[str]
    """The last components of an expert's linear layers in a checkpoint."""
    modules: Sequence[str]
    """Modules of experts with adapters, by transformers' names."""
    untouched: Sequence[str]
    fused: Sequence[str]
    """Fused tensors of a layer's experts that have one pair of LoRA matrices per expert."""
    is_representable: bool = True
    """Whether PEFT takes a target with the name of an expert's layer for all experts."""


NO_EXPERTS = AdaptedExperts((), (), (), ())


@dataclass(frozen=True)
class LoraScaling:
    """The scaling of an adapter, and the other hyperparameters in `adapter_config.json`."""

    rank: int
    alpha: float
    scaling: Scaling = "rank"
    dropout: float = 0.0
    bias: Bias = "none"
    normed: Literal["plain", "dora"] = "plain"

    @property
    def scale(self) -> float:
        return lora_scaling(self.rank, self.alpha, self.scaling)


def peft_name(native: str) -> str:
    """The name in `adapter_model.safetensors` of the LoRA parameter with this native name."""
    factor = parse_lora_name(native)
    assert factor is not None, f"{native} is no part of an adapter"
    prefix = f"{PREFIX}{factor.hf_module}"
    if factor.side == MAGNITUDE:
        return f"{prefix}.{NORMS}"
    first, second = EMBEDDED if factor.is_embedding else LINEAR
    return f"{prefix}.{first if factor.side == 'lora_A' else second}"


def peft_bias(name: str, adapted: Collection[str]) -> str:
    """The name in `adapter_model.safetensors` of a bias of the base model. PEFT inserts
    `base_layer` into the names of adapted layers."""
    layer, _, leaf = name.rpartition(".")
    return f"{PREFIX}{layer}{'.base_layer' * (layer in adapted)}.{leaf}"


def fused_factors(
    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]], num_experts: int
) -> dict[str, torch.Tensor]:
    """PEFT's tensors for A [E, r, in] and B [E, out, r] (without E where all experts share them) of
    transformers' fused expert tensors, by PEFT name.

    PEFT orders the rows of A by (expert, rank) and the columns of B by (rank, expert). It wraps a
    module once per adapted tensor; see `is_inner_expert_stack`.
    """
    factors: dict[str, torch.Tensor] = {}
    for name, (lora_A, lora_B) in pairs.items():
        module, _, last = name.rpartition(".")
        is_inner = is_inner_expert_stack(last, f"{module}.{FUSED_EXPERTS[1]}" in pairs)
        prefix = f"{PREFIX}{module}{'.base_layer' * is_inner}"
        a = lora_A.expand(num_experts, *lora_A.shape[-2:])
        b = lora_B.expand(num_experts, *lora_B.shape[-2:])
        factors[f"{prefix}.lora_A.weight"] = a.flatten(0, 1)
        factors[f"{prefix}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1)
    return factors


def is_inner_expert_stack(matrix: str, down_is_adapted: bool) -> bool:
    """Whether PEFT's module of this expert stack is within another: it wraps the experts for
    gate_up_proj, or up_proj where there is no gate, and then for down_proj."""
    return matrix != FUSED_EXPERTS[1] and down_is_adapted


def separate_factors(
    lora_A: torch.Tensor, lora_B: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `fused_factors`: A [E, r, in] and B [E, out, r]."""
    a = lora_A.unflatten(0, (num_experts, -1))
    return a, lora_B.unflatten(1, (-1, num_experts)).permute(2, 0, 1).contiguous()


def adapter_config(
    strength: LoraScaling,
    *,
    adapted: Sequence[str],
    linear_layers: Iterable[str],
    base_model: str,
    revision: str | None = None,
    experts: AdaptedExperts = NO_EXPERTS,
    shortens: bool = True,
) -> dict[str, Any]:
    """The content of `adapter_config.json`.

    `adapted` are the checkpoint names of the adapted layers and `linear_layers` those of all linear
    layers, both without `experts`. A last component (`q_proj`) is written where all layers with it
    are adapted, unless `shortens` is false because other parts of the model may have it too;
    otherwise the adapted layers are listed by full name.
    """
    chosen = set(adapted)
    rank, alpha, dropout = strength.rank, strength.alpha, strength.dropout
    scaling = strength.scaling
    if scaling != "rank" and (experts.modules or experts.fused):
        # PEFT merges LoRA parameters of experts as if alpha were always divided by the rank.
        alpha, scaling = strength.scale * rank, "rank"
    untouched = {name.rpartition(".")[2] for name in linear_layers if name not in chosen}
    targets = {
        name if last in untouched or not shortens else last
        for name in adapted
        if (last := name.rpartition(".")[2]) not in experts.parts
    }
    # In most MoE models PEFT takes a target with the name of an expert's layer for all experts.
    # Dense layers of that name, and experts if only some MoE layers are adapted or the family is
    # none of those, are target_parameters.
    parameters = [f"{name}.weight" for name in adapted if name.rpartition(".")[2] in experts.parts]
    patterns: dict[str, Any] = {}
    if experts.modules and not experts.untouched and experts.is_representable:
        targets |= set(experts.parts)
    elif experts.modules:
        parameters += [f"{module}.{name}" for module in experts.modules for name in FUSED_EXPERTS]
        # PEFT has gate and up as one parameter, so their LoRA matrices are concatenated: twice the
        # rank.
        patterns = {
            "rank_pattern": {FUSED_EXPERTS[0]: 2 * rank},
            "alpha_pattern": {FUSED_EXPERTS[0]: 2 * alpha},
        }
    parameters += experts.fused
    if parameters:
        patterns["target_parameters"] = sorted(parameters)
        # PEFT does not support dropout with `target_parameters` and refuses to load a nonzero
        # value.
        dropout = 0.0
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "revision": revision,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": sorted(targets),
        "bias": strength.bias,
        "fan_in_fan_out": False,
        "use_rslora": scaling == "root",
        "use_dora": strength.normed == "dora",
        "init_lora_weights": True,
        "modules_to_save": None,
        **patterns,
    }
