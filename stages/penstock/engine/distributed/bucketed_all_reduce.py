"""Bucketed gradient all-reduce (as in DDP), overlapped with the backward pass."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

BUCKET_MB = 25
"""MiB of gradients in one all-reduce: large enough for bandwidth, small enough that the first
buckets start early in the backward pass.
"""


@dataclass
class _Bucket:
    """Parameters whose gradients are all-reduced together."""

    parameters: list[nn.Parameter]
    missing: int = 0
    """How many gradients of the bucket are not computed yet."""
    buffer: torch.Tensor | None = None
    under_way: Any = field(default=None, repr=False)


class BucketedAllReduce:
    """All-reduces gradients over one group.

    Every rank must hold the same parameters in the same order.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: dist.ProcessGroup,
        *,
        overlaps: bool,
        bucket_mb: int = BUCKET_MB,
    ) -> None:
        """With `overlaps`, a bucket is reduced as soon as the backward pass has filled it.

        Without it all buckets are reduced by `finish`, as needed for reentrant checkpointing and
        pipelines, which run several backward passes.
        """
        self._group = group
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        # The backward pass computes the gradients of the last parameters first.
        self._buckets = list(_buckets(trained[::-1], bucket_mb << 20))
        self._collects = False
        self._next = 0
        for bucket in self._buckets if overlaps else ():
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._on_gradient(bucket))

    def start(self) -> None:
        """Start collecting: the next backward pass is the last one of the step."""
        self._collects, self._next = True, 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    def wait(self) -> None:
        """Wait until every gradient is the sum over all ranks of the group."""
        self._collects = False
        while self._next < len(self._buckets):
            self._send()
        for bucket in self._buckets:
            bucket.under_way.wait()
            _unpack(bucket)

    def _on_gradient(self, bucket: _Bucket) -> Any:
        def hook(_: nn.Parameter) -> None:
            if not self._collects:
                return
            bucket.missing -= 1
            # Reduce buckets in the same order on all ranks, in whatever order gradients are ready.
            while self._next < len(self._buckets) and not self._buckets[self._next].missing:
                self._send()

        return hook

    def _send(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        bucket.buffer = _packed(bucket.parameters)
        bucket.under_way = dist.all_reduce(bucket.buffer, group=self._group, async_op=True)


def _buckets(parameters: Sequence[nn.Parameter], full: int) -> Iterable[_Bucket]:
    """Split parameters into buckets of one dtype and at least `full` bytes, except the last."""
    held: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if held and (size >= full or parameter.grad_dtype != held[0].grad_dtype):
            yield _Bucket(held)
            held, size = [], 0
        held.append(parameter)
        size += parameter.numel() * (parameter.grad_dtype or parameter.dtype).itemsize
    if held:
        yield _Bucket(held)


def _packed(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    # A missing gradient counts as zero: other ranks may have one.
    return torch.cat([(_zeros(p) if p.grad is None else p.grad).reshape(-1) for p in parameters])


def _zeros(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter, dtype=parameter.grad_dtype)


def _unpack(bucket: _Bucket) -> None:
    assert bucket.buffer is not None
    sizes = [parameter.numel() for parameter in bucket.parameters]
    for parameter, flat in zip(bucket.parameters, bucket.buffer.split(sizes), strict=True):
        # A view: the buffer lives as long as the gradients, without a copy.
        parameter.grad = flat.view_as(parameter)
    bucket.buffer = bucket.under_way = None
