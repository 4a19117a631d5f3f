"""Strided tensors that kernels read without a copy: contiguous spans at a constant stride."""

from typing import NamedTuple

import torch


class Spans(NamedTuple):
    """A tensor whose elements, in order, are spans of length, each stride after the one before
    it begins."""

    tensor: torch.Tensor
    length: int
    stride: int


def to_spans(x: torch.Tensor) -> Spans:
    """x, such as one part of a fused projection; or a copy, where it is not such spans.

    Memory without a gap is one span, and its stride 0.
    """
    # The stride of a dimension of one element is arbitrary.
    dimensions = [(size, step) for size, step in zip(x.shape, x.stride(), strict=True) if size != 1]
    length = 1
    # Inner dimensions without gaps are one span, and the next outer ones count spans if each
    # continues at the same stride.
    while dimensions and dimensions[-1][1] == length:
        length *= dimensions.pop()[0]
    if not dimensions:
        return Spans(x, length, 0)
    size, stride = dimensions.pop()
    while dimensions and dimensions[-1][1] == stride * size:
        size *= dimensions.pop()[0]
    # Rows at more than one stride, or elements apart: reading those costs more than a copy.
    if dimensions or length == 1:
        return Spans(x.contiguous(), x.numel(), 0)
    return Spans(x, length, stride)
