"""Which parameters weight decay applies to, which learn at another rate, and which are matrices."""

import re
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

RATE = "rate"
"""What of the schedule's learning rate a group has, among the group's settings."""

MATRICES = "matrices"
"""Whether a group's parameters are matrices that Muon steps, among the group's settings."""

FASTER = ".lora_B."
"""Names of the second factors of adapters, which start at zero."""

OF_EMBEDDING = ".embed_tokens."
"""Names of factors of an embedding, the first of which starts at zero."""

LAYER = re.compile(r"\.layers\.(\d+)\.")

RateOf = Callable[[str], float]
"""A parameter's name to its share of the learning rate."""


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group what it has of the schedule's learning rate."""
    for group in optimizer.param_groups:
        rate = lr * group.get(RATE, 1.0)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def alike(_: str) -> float:
    """The same for all."""
    return 1.0


def layerwise_lr_decay(bound: float, num_layers: int) -> RateOf:
    """Shares of the learning rate by depth: b + d/(n+2) (1-b), b the `bound`, n the number of
    layers. d is 0 for the embedding, i for layer i, from 0, and n+2 for the final norm and the
    head. The formula is ERNIEKit's, in which layer 0 learns like the embedding."""

    def rate_of(name: str) -> float:
        depth = 0 if "embed_" in name else num_layers + 2
        if layer := LAYER.search(name):
            depth = int(layer[1])
        return bound + depth / (num_layers + 2) * (1 - bound)

    return rate_of


@dataclass(frozen=True)
class Grouping:
    """What tells parameters apart."""

    weight_decay: float = 0.0
    no_decay_modules: Iterable[str] = ()
    no_decay_params: Iterable[str] = ()
    lora_plus_ratio: float = 1.0
    rate_of: RateOf = alike
    matrices: Container[str] = field(default_factory=frozenset[str])
    """Names of parameters that Muon steps."""
    rate_of_matrices: float = 1.0
    """Theirs, as a share of the learning rate."""


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], grouping: Grouping
) -> list[dict[str, Any]]:
    """Optimizer groups of the trainable parameters: matrices of Muon last, before that those that
    learn faster last, and of these those that do not decay.

    A parameter does not decay if the name of its module (`model.layers.0.input_layernorm`) contains
    one of `no_decay_modules`, or its own name (the same with `.weight` or `.bias`) one of
    `no_decay_params`. The second factors of adapters on linear layers and experts learn
    `lora_plus_ratio` times as fast (Hayou et al. 2024, "LoRA+"); this changes nothing of what
    decays, though decay, which is a share of the rate, is as much stronger. Parameters keep their
    order and, in the group, their names; a group that would be empty is left out.
    """
    groups: dict[tuple[bool, float, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named_parameters:
        if not parameter.requires_grad:
            continue
        module = name.rpartition(".")[0]
        is_exempt = any(part in module for part in grouping.no_decay_modules) or any(
            part in name for part in grouping.no_decay_params
        )
        rate = grouping.rate_of(name)
        if FASTER in name and OF_EMBEDDING not in name:
            rate *= grouping.lora_plus_ratio
        is_matrix = name in grouping.matrices
        if is_matrix:
            rate *= grouping.rate_of_matrices
        exempts = is_exempt or not grouping.weight_decay
        groups.setdefault((is_matrix, rate, exempts), []).append((name, parameter))
    return [
        {
            "params": parameters,
            "weight_decay": 0.0 if is_exempt else grouping.weight_decay,
            RATE: rate,
            MATRICES: is_matrix,
        }
        for (is_matrix, rate, is_exempt), parameters in sorted(
            groups.items(), key=lambda item: item[0]
        )
    ]
