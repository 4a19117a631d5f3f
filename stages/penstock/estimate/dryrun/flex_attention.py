"""flex_attention in a dry run: one launch a pass, which is not compiled.

N query heads, K key/value heads, T tokens, H head width.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxOutput

from penstock_kernels.attention import flex

Record = Callable[[str, Sequence[torch.Tensor]], None]
"""Records a kernel that reads or writes these tensors, the query first."""


def record_flex_attention(record: Record) -> None:
    """Replace compiled `flex_attention` for the rest of this process."""

    def flex_attention(
        q_1NTH: torch.Tensor, k_1KTH: torch.Tensor, v_1KTH: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, AuxOutput]:
        out_1NTH, lse_1NT = _FlexAttention.apply(q_1NTH, k_1KTH, v_1KTH, record)
        return out_1NTH, AuxOutput(lse=lse_1NT)

    flex._compiled = lambda: flex_attention  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


class _FlexAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_1NTH: torch.Tensor,
        k_1KTH: torch.Tensor,
        v_1KTH: torch.Tensor,
        record: Record,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out_1NTH = torch.empty_like(q_1NTH)
        lse_1NT = q_1NTH.new_empty(q_1NTH.shape[:-1], dtype=torch.float32)
        # What torch's FlexAttentionAutogradOp saves, so that as much memory is held until then.
        ctx.save_for_backward(q_1NTH, k_1KTH, v_1KTH, out_1NTH, lse_1NT)
        ctx.record = record
        record("flex_attention", [q_1NTH, k_1KTH, v_1KTH, out_1NTH])
        return out_1NTH, lse_1NT

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_1NTH, k_1KTH, v_1KTH, out_1NTH, _ = ctx.saved_tensors
        gradients = [torch.empty_like(x) for x in (q_1NTH, k_1KTH, v_1KTH)]
        record: Record = ctx.record
        record("flex_attention_backward", [q_1NTH, k_1KTH, v_1KTH, out_1NTH, slopes[0], *gradients])
        return *gradients, None
