"""Our adapters in the form the PEFT library reads and writes."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from penstock.adapters.names import MAGNITUDE, parse_factor
from penstock.adapters.scaling import Scaling, lora_scaling

PREFIX = "base_model.model."

LINEAR = ("lora_A.weight", "lora_B.weight")
EMBEDDED = ("lora_embedding_A", "lora_embedding_B")
NORMS = "lora_magnitude_vector"
"""What PEFT calls the two factors of a linear layer and of an embedding, and the magnitudes of
either, after the layer's name."""

Bias = Literal["none", "all", "lora_only"]
"""Which biases of the model are trained as well: all it has, or those of adapted layers."""


FUSED_EXPERTS = ("gate_up_proj", "down_proj")
"""What transformers keeps the experts of a layer in."""


@dataclass(frozen=True)
class AdaptedExperts:
    """Which experts of a model bear adapters. Those of a layer do so all, and on each matrix."""

    parts: Collection[str]
    """The last names of an expert's linear layers in a checkpoint."""
    modules: Sequence[str]
    """Those that do, by the names that the experts of a layer have in transformers' model."""
    untouched: Sequence[str]
    """Those that do not."""
    fused: Sequence[str]
    """Tensors of all of a layer's experts that bear a pair for each."""


NO_EXPERTS = AdaptedExperts((), (), (), ())


@dataclass(frozen=True)
class LoraScaling:
    """How strongly an adapter counts, and what else a folder says of how it was trained."""

    rank: int
    alpha: float
    scaling: Scaling = "rank"
    dropout: float = 0.0
    bias: Bias = "none"
    normed: Literal["plain", "dora"] = "plain"

    @property
    def scale(self) -> float:
        """What the product of the factors is multiplied by."""
        return lora_scaling(self.rank, self.alpha, self.scaling)


def peft_name(native: str) -> str:
    """The name in `adapter_model.safetensors` of the adapter's tensor with this native name."""
    factor = parse_factor(native)
    assert factor is not None, f"{native} is no part of an adapter"
    at = f"{PREFIX}{factor.hf_module}"
    if factor.side == MAGNITUDE:
        return f"{at}.{NORMS}"
    first, second = EMBEDDED if factor.of_embedding else LINEAR
    return f"{at}.{first if factor.side == 'lora_A' else second}"


def peft_bias(name: str, adapted: Collection[str]) -> str:
    """The name there of a bias of the base model. PEFT wraps the layers that bear adapters."""
    layer, _, leaf = name.rpartition(".")
    return f"{PREFIX}{layer}{'.base_layer' * (layer in adapted)}.{leaf}"


def fused_factors(
    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]], num_experts: int
) -> dict[str, torch.Tensor]:
    """PEFT's tensors for the pairs A [E, r, in] and B [E, out, r], or without E where all experts
    share them, of what transformers keeps a layer's experts in; by its name.

    PEFT has the rows of A by expert and rank, and the columns of B by rank and expert. It wraps
    what it adapts of one module again and again, the last in the order of FUSED_EXPERTS outermost.
    """
    found: dict[str, torch.Tensor] = {}
    for name, (lora_A, lora_B) in pairs.items():
        module, _, last = name.rpartition(".")
        is_inner = last == FUSED_EXPERTS[0] and f"{module}.{FUSED_EXPERTS[1]}" in pairs
        at = f"{PREFIX}{module}{'.base_layer' * is_inner}"
        a = lora_A.expand(num_experts, *lora_A.shape[-2:])
        b = lora_B.expand(num_experts, *lora_B.shape[-2:])
        found[f"{at}.lora_A.weight"] = a.flatten(0, 1)
        found[f"{at}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1)
    return found


def separate_factors(
    lora_A: torch.Tensor, lora_B: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A [E, r, in] and B [E, out, r] of what `fused_factors` makes of them."""
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
) -> dict[str, Any]:
    """The content of `adapter_config.json`.

    `adapted` are the adapted layers' names in a checkpoint, and `linear_layers` all that it has,
    both without those of `experts`: a last name (`q_proj`) stands for its layers where all of them
    are adapted, and they are listed one by one where only some are.
    """
    chosen = set(adapted)
    rank, alpha, dropout = strength.rank, strength.alpha, strength.dropout
    scaling = strength.scaling
    if scaling != "rank" and (experts.modules or experts.fused):
        # PEFT brings factors of experts together as if alpha were always divided by the rank.
        alpha, scaling = strength.scale * rank, "rank"
    untouched = {name.rpartition(".")[2] for name in linear_layers if name not in chosen}
    targets = {
        name if last in untouched else last
        for name in adapted
        if (last := name.rpartition(".")[2]) not in experts.parts
    }
    # In a model with experts PEFT takes a module by the name of one of theirs for all of them. So
    # other networks, and experts of which some bear none, are told as parameters.
    parameters = [f"{name}.weight" for name in adapted if name.rpartition(".")[2] in experts.parts]
    patterns: dict[str, Any] = {}
    if experts.modules and not experts.untouched:
        targets |= set(experts.parts)
    elif experts.modules:
        parameters += [f"{module}.{name}" for module in experts.modules for name in FUSED_EXPERTS]
        # Gate and up are one parameter there, whose factors are theirs side by side.
        patterns = {
            "rank_pattern": {FUSED_EXPERTS[0]: 2 * rank},
            "alpha_pattern": {FUSED_EXPERTS[0]: 2 * alpha},
        }
    parameters += experts.fused
    if parameters:
        patterns["target_parameters"] = sorted(parameters)
        # PEFT drops nothing of what goes into parameters, and refuses to load what says it does.
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
