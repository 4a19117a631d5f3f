"""Kernels as custom operators of PyTorch's dispatcher, for torch.compile.

A plain kernel call breaks the compiler's graph. A custom operator has a name
(`torch.ops.penstock.…`), a schema derived from its annotations, a fake implementation for shapes,
and gradients, which are operators too.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any

import torch

_LIBRARY = torch.library.Library("penstock", "DEF")

Backward = Callable[..., tuple[torch.Tensor | None, ...]]
"""A context and the gradients of the outputs to the gradients of the inputs."""
Keep = Callable[[Any, tuple[Any, ...], Any], None]
"""Saves on a context what backward needs of the inputs and the output."""


def operator(
    name: str,
    run: Callable[..., Any],
    *,
    fake: Callable[..., Any],
    keep: Keep | None = None,
    backward: Backward | None = None,
    writes: Sequence[str] = (),
) -> Callable[..., Any]:
    """Register `run` as `torch.ops.penstock.<name>` on every device, and return the operator.

    Args:
        run: takes and returns tensors and plain numbers, as annotated. It returns new memory,
            never a view of its inputs.
        fake: with the same arguments, returns empty tensors of the shapes, strides, dtypes and
            devices of the result. Shapes may be symbolic: do not branch on them.
        keep, backward: its gradients. Without them it has none, as backward's own kernels.
        writes: the arguments that it changes in place.
    """
    schema = torch.library.infer_schema(run, mutates_args=writes)
    _LIBRARY.define(f"{name}{schema}")
    # One implementation for all devices, which the compiler does not trace into, as it would into
    # a CompositeImplicitAutograd one.
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    qualified = f"penstock::{name}"
    torch.library.register_fake(qualified, fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(qualified, backward, setup_context=keep, lib=_LIBRARY)
    # The overload: a call by the name alone would choose it anew each time.
    return getattr(torch.ops.penstock, name).default


def fake_like(*indices: int) -> Callable[..., Any]:
    """A fake implementation whose results are contiguous, of the shapes and dtypes of the arguments
    at these places: one tensor, or several. `None` gives an empty one of the first one's dtype.
    """

    def fake(*args: Any) -> Any:
        first, *further = empty_like(*(args[index] for index in indices))
        return (first, *further) if further else first

    return fake


def empty_like(first: torch.Tensor, *further: torch.Tensor | None) -> list[torch.Tensor]:
    """Memory for gradients, contiguous, in the order of the tensors; for `None` without elements,
    since a custom operator returns tensors alone."""
    # Not `torch.empty_like`, which keeps the strides of a transposed tensor: kernels write in
    # order.
    return [
        first.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape)
        for tensor in (first, *further)
    ]


def keep_inputs(
    tensors: int, *outputs: int, first: int = 0, materialize_grads: bool = True
) -> Keep:
    """Save the inputs from number `first` to `tensors` and then these outputs for the backward
    pass; the further inputs, which are no tensors, are `ctx.options`. `materialize_grads`: whether
    gradients of unused outputs are zeros, or None.
    """

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        # By default autograd makes a tensor of zeros for each undefined gradient.
        if not materialize_grads:
            ctx.set_materialize_grads(False)
        # Not attributes of ctx: checkpointing and offload see saved tensors alone, and an output
        # kept as an attribute would be a cycle that no reference count frees.
        ctx.options = inputs[tensors:]
        ctx.save_for_backward(*inputs[first:tensors], *(output[index] for index in outputs))

    return keep


def needed(ctx: Any, gradients: Iterable[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """The gradients of the first inputs, and None for inputs that need none."""
    # `needs_input_grad` is False for inputs that are no tensors.
    return tuple(
        gradient if needs_grad else None
        for gradient, needs_grad in zip_longest(gradients, ctx.needs_input_grad)
    )
