"""Parameter groups: weight decay, learning rate multipliers (LoRA+, layer-wise), Muon matrices."""

import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from penstock.models.vision.types import VISION

# Key of a parameter group: its multiplier of the scheduled learning rate.
RATE = "rate"

# Key of a parameter group: whether Muon updates its parameters.
MATRICES = "matrices"

# Part of the names of LoRA B matrices, which are initialized to zero.
LORA_B = ".lora_B."

# Part of the names of embedding adapters, whose A matrix is the one initialized to zero.
EMBEDDING_ADAPTER = ".embed_tokens."

LAYER = re.compile(r"\.layers\.(\d+)\.")

LrMultiplierFn = Callable[[str], float]


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group to `lr` times its multiplier."""
    for group in optimizer.param_groups:
        rate = lr * group.get(RATE, 1.0)
        # A compiled step keeps the rate in a tensor: a new number would recompile it.
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def constant_multiplier(_: str) -> float:
    """Multiplier 1 for all parameters."""
    return 1.0


def layerwise_lr_decay(bound: float, num_layers: int) -> LrMultiplierFn:
    """Layer-wise learning rate decay: multiplier b + d/(n+2) (1-b), with b the `bound` and n the
    number of layers. d is 0 for the embedding and a vision part, i for layer i (from 0), and n+2
    for the final norm and the LM head. The formula is ERNIEKit's, in which layer 0 has the
    embedding's rate."""

    def lr_multiplier(name: str) -> float:
        depth = 0 if "embed_" in name else num_layers + 2
        if name.startswith(VISION):
            return bound
        if layer := LAYER.search(name):
            depth = int(layer[1])
        return bound + depth / (num_layers + 2) * (1 - bound)

    return lr_multiplier


def with_part_lrs(
    multiplier: LrMultiplierFn, part: Callable[[str], str], ratios: Mapping[str, float]
) -> LrMultiplierFn:
    """`multiplier`, but the ratio of its part for parameters of a part in `ratios`."""
    return lambda name: ratios[part(name)] if part(name) in ratios else multiplier(name)


@dataclass(frozen=True)
class Grouping:
    """Rules that assign parameters to groups."""

    weight_decay: float = 0.0
    no_decay_modules: Iterable[str] = ()
    no_decay_params: Iterable[str] = ()
    lora_plus_ratio: float = 1.0
    lr_multiplier: LrMultiplierFn = constant_multiplier
    matrices: Container[str] = field(default_factory=frozenset[str])
    muon_lr_multiplier: float = 1.0


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], grouping: Grouping
) -> list[dict[str, Any]]:
    """Parameter groups of the trainable parameters, sorted by (Muon matrix, learning rate
    multiplier, exempt from weight decay).

    A parameter is exempt from weight decay if its module name (`model.layers.0.input_layernorm`)
    contains one of `no_decay_modules`, or its own name (with `.weight` or `.bias`) one of
    `no_decay_params`. LoRA B matrices of linear layers and experts have `lora_plus_ratio` times the
    learning rate (Hayou et al. 2024, "LoRA+"); because weight decay is multiplied by the learning
    rate, their decay is stronger by the same factor. Groups contain (name, parameter) in model
    order; empty groups are omitted.
    """
    groups: dict[tuple[bool, float, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named_parameters:
        if not parameter.requires_grad:
            continue
        module = name.rpartition(".")[0]
        is_exempt = any(part in module for part in grouping.no_decay_modules) or any(
            part in name for part in grouping.no_decay_params
        )
        rate = grouping.lr_multiplier(name)
        if LORA_B in name and EMBEDDING_ADAPTER not in name:
            rate *= grouping.lora_plus_ratio
        is_matrix = name in grouping.matrices
        if is_matrix:
            rate *= grouping.muon_lr_multiplier
        # Without any decay one group does for both: fewer launches of a foreach or fused step.
        exempts = is_exempt or not grouping.weight_decay
        groups.setdefault((is_matrix, rate, exempts), []).append((name, parameter))
    return [
        {
            "params": parameters,
            "weight_decay": 0.0 if is_exempt else grouping.weight_decay,
            RATE: rate,
            MATRICES: is_matrix,
        }
        for (is_matrix, rate, is_exempt), parameters in sorted(groups.items(), key=itemgetter(0))
    ]
