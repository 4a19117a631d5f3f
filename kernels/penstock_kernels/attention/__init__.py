"""Causal attention within each document of a flat micro-batch; grouped key and value heads, windows
that slide over a document, and sinks."""

from penstock_kernels.attention import native as _native
from penstock_kernels.attention import sdpa as _sdpa
from penstock_kernels.attention.reference import eager as _eager
from penstock_kernels.attention.segments import Segments
from penstock_kernels.op import Fast, Op

__all__ = ["Segments", "attention"]

attention = Op(
    "attention",
    _eager,
    {
        "native": Fast(_native.native, _native.refuses),
        "sdpa": Fast(_sdpa.sdpa, _sdpa.refuses),
    },
    reference_name="eager",
)
