"""Kernels as operators of PyTorch's dispatcher, which torch.compile passes through.

A kernel that is only called is opaque to the compiler: it breaks the graph there. As an operator it
has a name (torch.ops.penstock.…), a schema that follows from its annotations, a fake, which says
what comes out without computing it, and gradients, which are operators too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

_LIBRARY = torch.library.Library("penstock", "DEF")

Backward = Callable[..., tuple[torch.Tensor | None, ...]]
"""A context and the gradients of the outputs to those of the inputs."""
Keep = Callable[[Any, tuple[Any, ...], Any], None]
"""Puts on a context what backward needs of the inputs and the output."""


def operator(
    name: str,
    run: Callable[..., Any],
    *,
    fake: Callable[..., Any],
    keep: Keep | None = None,
    backward: Backward | None = None,
    writes: Sequence[str] = (),
) -> Callable[..., Any]:
    """Register run as torch.ops.penstock.<name> on every device, and return the operator.

    Args:
        run: takes and gives tensors and plain numbers, as annotated. What it gives is new memory,
            no view of what it took.
        fake: with the same arguments, empty tensors of the shapes, strides, dtypes and devices of
            what run gives. Shapes may be symbols: no branch on them.
        keep, backward: its gradients. Without them it has none, as backward's own kernels.
        writes: the arguments that it changes in place.
    """
    schema = torch.library.infer_schema(run, mutates_args=writes)
    _LIBRARY.define(f"{name}{schema}")
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    qualified = f"penstock::{name}"
    torch.library.register_fake(qualified, fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(qualified, backward, setup_context=keep, lib=_LIBRARY)
    return getattr(torch.ops.penstock, name).default
