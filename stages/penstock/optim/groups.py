"""Which parameters weight decay applies to, and which learn at another rate."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

RATE = "rate"
"""What of the schedule's learning rate a group has, among the group's settings."""

FASTER = ".lora_B."
"""Names of the second factors of adapters, which start at zero."""

OF_EMBEDDING = ".embed_tokens."
"""Names of factors of an embedding, the first of which starts at zero."""


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    weight_decay: float,
    no_decay_modules: Sequence[str] = (),
    no_decay_params: Sequence[str] = (),
    lora_plus_ratio: float = 1.0,
) -> list[dict[str, Any]]:
    """Optimizer groups of the trainable parameters: those that decay, then those that do not, and
    of either those that learn faster last.

    A parameter does not decay if the name of its module (`model.layers.0.input_layernorm`) contains
    one of `no_decay_modules`, or its own name (the same with `.weight` or `.bias`) one of
    `no_decay_params`. The second factors of adapters on linear layers and experts learn
    `lora_plus_ratio` times as fast (Hayou et al. 2024, "LoRA+"); this changes nothing of what
    decays, though decay, which is a share of the rate, is as much stronger. Parameters keep their
    order and, in the group, their names; a group that would be empty is left out.
    """
    groups: dict[tuple[float, float], list[tuple[str, nn.Parameter]]] = {}
    for rate in (1.0, lora_plus_ratio):
        for decay in (weight_decay, 0.0):
            groups.setdefault((decay, rate), [])
    for name, parameter in named_parameters:
        if not parameter.requires_grad:
            continue
        module = name.rpartition(".")[0]
        is_exempt = any(part in module for part in no_decay_modules) or any(
            part in name for part in no_decay_params
        )
        learns_faster = FASTER in name and OF_EMBEDDING not in name
        key = (0.0 if is_exempt else weight_decay, lora_plus_ratio if learns_faster else 1.0)
        groups[key].append((name, parameter))
    return [
        {"params": parameters, "weight_decay": decay, RATE: rate}
        for (decay, rate), parameters in groups.items()
        if parameters
    ]
