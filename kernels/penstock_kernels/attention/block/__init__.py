"""Attention of a block of queries to a block of keys, with log-sum-exps for merging blocks.

Q queries, S keys, N query heads, K key/value heads (N a multiple of K), H head width. The
backends have the names of attention's, so that one name selects both. The FlashAttention packages
have no gradients of a block; PyTorch's kernels of the same algorithm do.
"""

from penstock_kernels.attention.block import native as _native
from penstock_kernels.attention.block import reference as _reference
from penstock_kernels.attention.block import sdpa as _sdpa
from penstock_kernels.attention.block.block_mask import Rectangle, Sees
from penstock_kernels.flash_packages import PACKAGES
from penstock_kernels.op import KernelImpl, Op

__all__ = ["Rectangle", "Sees", "block", "block_backward"]

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
        "native": KernelImpl(_native.block_backward, _native.refuses_backward),
        "sdpa": KernelImpl(_sdpa.block_backward, _sdpa.refuses_backward),
        **dict.fromkeys(PACKAGES, KernelImpl(_native.block_backward, _native.refuses_backward)),
    },
    reference_name="eager",
)
