"""Which parameters weight decay applies to."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    weight_decay: float,
    no_decay_modules: Sequence[str] = (),
    no_decay_params: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Optimizer groups of the trainable parameters: those that decay, then those that do not.

    A parameter does not decay if the name of its module (`model.layers.0.input_layernorm`) contains
    one of `no_decay_modules`, or its own name (the same with `.weight` or `.bias`) one of
    `no_decay_params`. Parameters keep their order and, in the group, their names; a group that
    would be empty is left out.
    """
    decaying: list[tuple[str, nn.Parameter]] = []
    exempt: list[tuple[str, nn.Parameter]] = []
    for name, parameter in named_parameters:
        if not parameter.requires_grad:
            continue
        module = name.rpartition(".")[0]
        is_exempt = any(part in module for part in no_decay_modules) or any(
            part in name for part in no_decay_params
        )
        (exempt if is_exempt else decaying).append((name, parameter))
    groups = [
        {"params": decaying, "weight_decay": weight_decay},
        {"params": exempt, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
