"""AdamW step of many tensors: small ones are concatenated."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from penstock_kernels.adamw.reference import Settings

# Elements of a tensor that is concatenated: calls cost more than copies.
SMALL = 1 << 16
MAX_CONCATENATED = 1 << 22
"""Maximum elements of a concatenation of several tensors."""


class StepTensors(NamedTuple):
    """Inputs and outputs of a step of one weight: tensors of one shape, as in `adamw_`."""

    weight: torch.Tensor
    gradient: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    lost: torch.Tensor | None = None
    """Rounding errors of the weight (Kahan summation)."""


def adamw_foreach_(
    states: Sequence[StepTensors],
    settings: Settings,
    adamw: Callable[..., None],
    concat_below: int = SMALL,
) -> None:
    """Apply `adamw` (an `adamw_`) to every weight, without stochastic rounding:
    its random numbers are drawn by row, and a concatenation has other rows.

    Weights of at most `concat_below` elements, of the same dtypes, are concatenated for it. Results
    equal those of separate calls.

    Raises:
        ValueError: as `adamw` does.
    """
    small: dict[tuple[object, ...], list[StepTensors]] = {}
    for state in states:
        if state.weight.numel() > concat_below:
            step_one(state, settings, adamw)
        elif state.weight.numel():
            # A concatenation has one dtype and one device.
            key = tuple(
                tensor if tensor is None else (tensor.dtype, tensor.device) for tensor in state
            )
            small.setdefault(key, []).append(state)
    for group in small.values():
        for bucket in split_buckets(group):
            if len(bucket) == 1:
                step_one(bucket[0], settings, adamw)
            else:
                step_concatenated(bucket, settings, adamw)


def step_one(state: StepTensors, settings: Settings, adamw: Callable[..., None]) -> None:
    """Step one weight as the matrix of its last dimension."""
    columns = state.weight.shape[-1] if state.weight.ndim else 1
    *tensors, lost = (tensor if tensor is None else tensor.view(-1, columns) for tensor in state)
    adamw(*tensors, settings, lost=lost)


def step_concatenated(
    bucket: Sequence[StepTensors], settings: Settings, adamw: Callable[..., None]
) -> None:
    """Step a bucket's weights in one call."""
    # One launch for the bucket: a launch costs more than copying 64 K elements twice.
    tensors = {
        name: [tensor.view(-1) for state in bucket if (tensor := getattr(state, name)) is not None]
        for name in StepTensors._fields
    }
    flat = {name: torch.cat(parts)[None] for name, parts in tensors.items() if parts}
    adamw(*(flat[name] for name in StepTensors._fields[:4]), settings, lost=flat.get("lost"))
    sizes = [state.weight.numel() for state in bucket]
    for name in flat.keys() - {"gradient"}:  # which the step only reads
        torch._foreach_copy_(tensors[name], list(flat[name].view(-1).split(sizes)))


def split_buckets(states: Sequence[StepTensors]) -> list[list[StepTensors]]:
    """Consecutive weights, at most MAX_CONCATENATED elements together."""
    buckets: list[list[StepTensors]] = []
    free = 0
    for state in states:
        if state.weight.numel() > free:
            buckets.append([])
            free = MAX_CONCATENATED
        buckets[-1].append(state)
        free -= state.weight.numel()
    return buckets
