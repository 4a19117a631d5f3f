"""Bucketed gradient all-reduce (as in DDP), overlapped with the backward pass."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
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
    parameters: list[nn.Parameter]
    num_pending: int = 0
    """How many gradients of the bucket are not computed yet."""
    buffer: torch.Tensor | None = None
    work: Any = field(default=None, repr=False)


class BucketedAllReduce:
    """All-reduces gradients over one group, whose ranks have the same parameters in one order."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: dist.ProcessGroup,
        *,
        overlaps: bool,
        bucket_mb: int = BUCKET_MB,
    ) -> None:
        """With `overlaps`, a bucket is reduced as soon as the backward pass has filled it.

        Without it all buckets are reduced by `wait`, as needed for reentrant checkpointing and
        pipelines, which run several backward passes.
        """
        self._group = group
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        # The backward pass computes the gradients of the last parameters first.
        self._buckets = list(_buckets(trainable[::-1], bucket_mb << 20))
        self._is_last_backward = False
        self._next = 0
        for bucket in self._buckets if overlaps else ():
            for parameter in bucket.parameters:
                # Not a hook on the gradient itself: that sees one pass, before it is added to
                # `grad`.
                parameter.register_post_accumulate_grad_hook(partial(self._on_grad, bucket))

    def start(self) -> None:
        """Start collecting: the next backward pass is the last one of the step."""
        self._is_last_backward, self._next = True, 0
        for bucket in self._buckets:
            bucket.num_pending = len(bucket.parameters)

    def wait(self) -> None:
        self._is_last_backward = False
        # Left without overlap: all; with it: from the first bucket with a parameter that got no
        # gradient on, since no hook runs for it.
        while self._next < len(self._buckets):
            self._launch_next()
        for bucket in self._buckets:
            # With NCCL the compute stream waits, and the host does not.
            bucket.work.wait()
            assert bucket.buffer is not None
            sizes = [parameter.numel() for parameter in bucket.parameters]
            for parameter, flat in zip(bucket.parameters, bucket.buffer.split(sizes), strict=True):
                # A view: the buffer lives as long as the gradients, without a copy.
                parameter.grad = flat.view_as(parameter)
            bucket.buffer = bucket.work = None

    def _on_grad(self, bucket: _Bucket, _: nn.Parameter) -> None:
        if not self._is_last_backward:
            return
        bucket.num_pending -= 1
        # Reduce buckets in the same order on all ranks, in whatever order gradients are ready.
        while self._next < len(self._buckets) and not self._buckets[self._next].num_pending:
            self._launch_next()

    def _launch_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        # A missing gradient counts as zero: other ranks may have one.
        gradients = (
            torch.zeros_like(p, dtype=p.grad_dtype) if p.grad is None else p.grad
            for p in bucket.parameters
        )
        bucket.buffer = torch.cat([gradient.reshape(-1) for gradient in gradients])
        bucket.work = dist.all_reduce(bucket.buffer, group=self._group, async_op=True)


def _buckets(parameters: Sequence[nn.Parameter], max_bytes: int) -> Iterable[_Bucket]:
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        # One dtype in each: `cat` would promote the others.
        if bucket and (size >= max_bytes or parameter.grad_dtype != bucket[0].grad_dtype):
            yield _Bucket(bucket)
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel() * (parameter.grad_dtype or parameter.dtype).itemsize
    if bucket:
        yield _Bucket(bucket)
