"""DeepEP token dispatch: expert parallelism over NVLink (https://github.com/deepseek-ai/DeepEP).

Each token is sent once to every rank that holds some of its experts. Uses `Buffer` of the optional
package.

Routing weights are sent with the tokens, so each rank weights and sums the outputs of its own
experts for a token, and these partial sums are sent back. In bf16 they are rounded once more than
the rows that `expert_parallel.AllToAllDispatcher` gets back.

T tokens of this rank, S received tokens, D model width, K experts per token.
"""

# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from penstock.core.errors import CapabilityError, ConfigError
from penstock.engine.moe.deepep_requirements import NO_DROPOUT
from penstock.models.layers.experts import Experts, Routing
from penstock.models.layers.moe import MoE
from penstock_kernels.permute import sort_by_expert

ELEMENT_BYTES = 2
"""Bytes of an element that is sent: DeepEP takes bfloat16 only."""

ALIGNMENT = 128
"""The buffer size must be a multiple of so many bytes."""

Combining = Literal["at_once", "meanwhile"]
"""Whether combine waits for its result at once, or where the result is used (overlap)."""


class Event(Protocol):
    """The completion event of a buffer operation."""

    def current_stream_wait(self) -> None: ...


class Buffer(Protocol):
    """The part of `deep_ep.Buffer` that is used here."""

    def get_dispatch_layout(
        self, topk_idx: torch.Tensor, num_experts: int
    ) -> tuple[Any, Any, Any, Any, Event]: ...

    def dispatch(
        self, x: torch.Tensor, **options: Any
    ) -> tuple[Any, Any, Any, Sequence[int], Any, Event]: ...

    def combine(
        self, x: torch.Tensor, handle: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None, Event]: ...


def open_buffer(group: dist.ProcessGroup, *, width: int, gigabytes: float, num_sms: int) -> Buffer:
    """Open the communication buffer of this rank for a model of this width; a collective call.
    Raises ConfigError if DeepEP's kernels need more memory than `gigabytes`."""
    # The import loads GPU kernels, so it must follow the choice of this process's device.
    from deep_ep import Buffer  # noqa: PLC0415

    # Before the configs are asked for, which depend on it.
    Buffer.set_num_sms(num_sms)
    size = int(gigabytes * 1e9) // ALIGNMENT * ALIGNMENT
    ranks = group.size()
    needed = max(
        config.get_nvl_buffer_size_hint(width * ELEMENT_BYTES, ranks)
        for config in (Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks))
    )
    if size < needed:
        raise ConfigError(
            f"model.deepep_buffer_size_gb is {gigabytes:g}, and {ranks} ranks with a hidden size "
            f"of {width} and model.deepep_num_sms: {num_sms} need {needed / 1e9:.3f}.\n"
            f"  Write model.deepep_buffer_size_gb: {-(-needed // 10**7) / 100:g}, or a smaller "
            "model.deepep_num_sms."
        )
    return Buffer(group, size)


class DeepEP:
    """The `dispatch` and `finish_dispatch` hooks of one MoE layer whose experts are on several
    ranks."""

    def __init__(self, buffer: Buffer, num_experts: int, *, combining: Combining) -> None:
        # Experts of all ranks; each holds equally many, in rank order.
        self._buffer, self._num_experts, self._combining = buffer, num_experts, combining
        self._pending: _PendingCombine | None = None

    def register_hooks(self, mixture: MoE) -> None:
        if mixture.experts.row_dropout is not None:
            raise CapabilityError(NO_DROPOUT)
        mixture.dispatch = self
        if self._combining == "meanwhile":
            mixture.finish_dispatch = self.wait_combine

    def __call__(
        self,
        x_TD: torch.Tensor,
        choice_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        experts: Experts,
        /,
    ) -> torch.Tensor:
        """The outputs of the tokens, [T, D]; complete after `finish_dispatch`, if there is one."""
        layout = _DispatchLayout(self._buffer, self._num_experts)
        x_SD, choice_SK, weights_SK = _DispatchTokens.apply(x_TD, choice_TK, weights_TK, layout)
        # Most tokens also have experts on other ranks: those copies are sorted last and left out.
        order = sort_by_expert(choice_SK, experts.num_experts)
        order = replace(order, copy_of_row=order.copy_of_row[: layout.num_rows])
        outputs_SD = experts(x_SD, Routing(order, weights_SK))
        if self._combining == "at_once":
            return _Combine.apply(outputs_SD, layout)
        self._pending = _PendingCombine(layout)
        return _CombineAsync.apply(outputs_SD, self._pending)

    def wait_combine(self, y_TD: torch.Tensor) -> torch.Tensor:
        pending, self._pending = self._pending, None
        assert pending, "wait_combine without a dispatch"
        return _WaitCombine.apply(y_TD, pending)


@dataclass(eq=False)
class _DispatchLayout:
    """The dispatch layout of sent tokens, reused to combine and for the backward pass."""

    buffer: Buffer
    num_experts: int
    handle: Any = None
    num_rows: int = 0
    """Copies of received tokens that have an expert on this rank."""


@dataclass(eq=False)
class _PendingCombine:
    """A combine in progress: outputs in the forward pass, their gradients in the backward pass."""

    layout: _DispatchLayout
    event: Event | None = None
    grad_SD: torch.Tensor | None = None  # noqa: N815 - SD names the dimensions

    def wait(self) -> None:
        assert self.event, "no combine is in progress"
        self.event.current_stream_wait()
        self.event = None


class _DispatchTokens(torch.autograd.Function):
    """Dispatch tokens to the ranks of their experts; the backward pass combines the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        choice_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        layout: _DispatchLayout,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.layout = layout
        # Here and below: DeepEP asserts that tensors are contiguous.
        choice_TK = choice_TK.contiguous()
        to_ranks, to_nodes, to_experts, is_sent, _ = layout.buffer.get_dispatch_layout(
            choice_TK, layout.num_experts
        )
        x_SD, choice_SK, weights_SK, counts, layout.handle, _ = layout.buffer.dispatch(
            x_TD.contiguous(),
            topk_idx=choice_TK,
            topk_weights=weights_TK.contiguous(),
            num_tokens_per_rank=to_ranks,
            num_tokens_per_rdma_rank=to_nodes,
            num_tokens_per_expert=to_experts,
            is_token_in_rank=is_sent,
        )
        # Python integers: `dispatch` has waited for the counts on the host.
        layout.num_rows = sum(counts)
        ctx.mark_non_differentiable(choice_SK)
        return x_SD, choice_SK, weights_SK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        dx_SD, _, dweights_SK = grads
        layout: _DispatchLayout = ctx.layout
        dx_TD, dweights_TK, _ = layout.buffer.combine(
            dx_SD.contiguous(), layout.handle, topk_weights=dweights_SK.contiguous()
        )
        return dx_TD, None, dweights_TK, None


class _Combine(torch.autograd.Function):
    """Combine each token's partial sums from all ranks; backward dispatches the gradient."""

    @staticmethod
    def forward(ctx: Any, outputs_SD: torch.Tensor, layout: _DispatchLayout) -> torch.Tensor:
        ctx.layout = layout
        return layout.buffer.combine(outputs_SD.contiguous(), layout.handle)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _dispatch_again(grads[0], ctx.layout)[0], None


class _CombineAsync(torch.autograd.Function):
    """`_Combine` without waiting for the result."""

    @staticmethod
    def forward(ctx: Any, outputs_SD: torch.Tensor, pending: _PendingCombine) -> torch.Tensor:
        ctx.pending = pending
        y_TD, _, pending.event = pending.layout.buffer.combine(
            outputs_SD.contiguous(), pending.layout.handle, async_finish=True
        )
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        del grads
        pending: _PendingCombine = ctx.pending
        pending.wait()
        grad_SD, pending.grad_SD = pending.grad_SD, None
        assert grad_SD is not None
        return grad_SD, None


class _WaitCombine(torch.autograd.Function):
    """Wait for the combined tokens.

    The backward pass dispatches their gradient without waiting: autograd continues with the
    operations in between before it reaches the experts.
    """

    @staticmethod
    def forward(ctx: Any, y_TD: torch.Tensor, pending: _PendingCombine) -> torch.Tensor:
        ctx.pending = pending
        pending.wait()
        return y_TD.view_as(y_TD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        pending: _PendingCombine = ctx.pending
        options = {"async_finish": True}
        pending.grad_SD, pending.event = _dispatch_again(grads[0], pending.layout, **options)
        # For the order alone: `_CombineAsync` takes the dispatched gradient in place of this one.
        return grads[0], None


def _dispatch_again(
    dy_TD: torch.Tensor, layout: _DispatchLayout, **options: Any
) -> tuple[torch.Tensor, Event]:
    """Dispatch other values of the same tokens with the layout of the first dispatch."""
    dy_SD, *_, event = layout.buffer.dispatch(dy_TD.contiguous(), handle=layout.handle, **options)
    return dy_SD, event
