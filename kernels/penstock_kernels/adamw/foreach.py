"""AdamW step of many tensors: small ones are concatenated."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from penstock_kernels.adamw.settings import Settings

SMALL = 1 << 16
"""Elements of a tensor that is concatenated: calls cost more than copies."""
MAX_CONCATENATED = 1 << 22
"""Maximum elements of a concatenation of several tensors."""


class StepTensors(NamedTuple):
    """Inputs and outputs of a step of one weight: tensors of one shape, as in `adamw_`."""

    weight: torch.Tensor
    gradient: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    lost: torch.Tensor | None = None


def adamw_foreach_(
    each: Sequence[StepTensors], settings: Settings, step: Callable[..., None], small: int = SMALL
) -> None:
    """Apply `step` (an `adamw_`) to every weight, without stochastic rounding.

    Weights of at most `small` elements, of the same dtypes, are concatenated for it. Results equal
    those of separate calls.

    Raises:
        ValueError: as `step` does.
    """
    alike: dict[tuple[object, ...], list[StepTensors]] = {}
    for one in each:
        if not one.weight.numel():
            continue
        if one.weight.numel() > small:
            _alone(one, settings, step)
            continue
        key = tuple(None if part is None else (part.dtype, part.device) for part in one)
        alike.setdefault(key, []).append(one)
    for ones in alike.values():
        for some in _batches(ones):
            if len(some) == 1:
                _alone(some[0], settings, step)
            else:
                _side_by_side(some, settings, step)


def _alone(one: StepTensors, settings: Settings, step: Callable[..., None]) -> None:
    columns = one.weight.shape[-1] if one.weight.ndim else 1
    weight, gradient, first, second = (part.view(-1, columns) for part in one[:4])
    lost = None if one.lost is None else one.lost.view(-1, columns)
    step(weight, gradient, first, second, settings, lost=lost)


def _side_by_side(
    some: Sequence[StepTensors], settings: Settings, step: Callable[..., None]
) -> None:
    columns = [[part for part in parts if part is not None] for parts in zip(*some, strict=True)]
    flat = [torch.cat([part.view(-1) for part in parts])[None] for parts in columns if parts]
    step(*flat[:4], settings, lost=flat[4] if columns[4] else None)
    sizes = [one.weight.numel() for one in some]
    written = [parts for at, parts in enumerate(columns) if parts and at != 1]
    made = [one for at, one in enumerate(flat) if at != 1]
    for parts, one in zip(written, made, strict=True):
        pieces = one.view(-1).split(sizes)
        torch._foreach_copy_([part.view(-1) for part in parts], list(pieces))


def _batches(ones: Sequence[StepTensors]) -> list[list[StepTensors]]:
    found: list[list[StepTensors]] = []
    room = 0
    for one in ones:
        if one.weight.numel() > room:
            found.append([])
            room = MAX_CONCATENATED
        found[-1].append(one)
        room -= one.weight.numel()
    return found
