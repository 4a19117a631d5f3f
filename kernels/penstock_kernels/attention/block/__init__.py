"""Attention of a block of queries to a block of keys, with log-sum-exps for merging blocks.

Q queries, S keys, N query heads, K key/value heads (N a multiple of K), H head width. The
backends have the names of attention's, so that one name selects both. The FlashAttention packages
have no gradients of a block; PyTorch's kernels of the same algorithm do.
"""

from collections.abc import Callable

from penstock_kernels.attention.block import native as _native
from penstock_kernels.attention.block import reference as _reference
from penstock_kernels.attention.block import sdpa as _sdpa
from penstock_kernels.attention.block.block_mask import Rectangle, Sees
from penstock_kernels.flash_packages import PACKAGES
from penstock_kernels.op import KernelImpl, Op

__all__ = ["Rectangle", "Sees", "block", "block_backward"]


def _unsupported_backward(
    unsupported_reason: Callable[..., str | None],
) -> Callable[..., str | None]:
    """What a backward pass does not support: the same as its forward pass."""
    return lambda _dy, q, k, v, _y, _lse, *more, **named: unsupported_reason(
        q, k, v, *more, **named
    )


_NATIVE_BACKWARD = KernelImpl(
    _native.block_backward, _unsupported_backward(_native.unsupported_reason)
)

block = Op(
    "block",
    _reference.block,
    {
        "native": KernelImpl(_native.block, _native.unsupported_reason),
        "sdpa": KernelImpl(_sdpa.block, _sdpa.unsupported_reason),
        **dict.fromkeys(PACKAGES, KernelImpl(_native.block, _native.unsupported_reason)),
    },
    reference_name="eager",
)
block_backward = Op(
    "block_backward",
    _reference.block_backward,
    {
        "native": _NATIVE_BACKWARD,
        "sdpa": KernelImpl(_sdpa.block_backward, _unsupported_backward(_sdpa.unsupported_reason)),
        **dict.fromkeys(PACKAGES, _NATIVE_BACKWARD),
    },
    reference_name="eager",
)
