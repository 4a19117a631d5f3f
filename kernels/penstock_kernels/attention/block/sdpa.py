"""A block through the fused kernels behind scaled_dot_product_attention, which return the
log-sum-exp that the public function does not return: one call per bucket of documents.

B documents of a bucket, L tokens of each.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F

from penstock_kernels.attention.block import chunks
from penstock_kernels.attention.block.block_mask import Rectangle, Sees, unsupported_sizes
from penstock_kernels.attention.mask import causal_window_mask
from penstock_kernels.attention.segments import VarlenMetadata

Tensors = tuple[torch.Tensor, ...]

Keys = Literal["all", "past"]
"""The mask: none, or causal."""

# The CUDA kernel pads the queries of its log-sum-exp to a multiple of this.
CUDA_ROWS = 32
# The stride of a mask's rows must be a multiple of this.
CUDA_COLUMNS = 16


def unsupported_reason(
    q_QNH: torch.Tensor,
    k_SKH: torch.Tensor,
    v_SKH: torch.Tensor,
    sees: Sees,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> str | None:
    """CPU and CUDA; on CUDA, head widths that the kernel reads as whole vectors."""
    del scale, v_SKH, window
    if soft_cap is not None:
        return f"scores are capped at {soft_cap}, and PyTorch's fused kernels do not cap them"
    device, width = q_QNH.device.type, q_QNH.shape[-1]
    if device not in ("cpu", "cuda"):
        return f"its tensors are on {device}, and it needs cpu or cuda"
    if device == "cuda" and q_QNH.dtype == torch.float64:
        return "its tensors are torch.float64, and on cuda it takes float32, bfloat16 and float16"
    if device == "cuda" and width % 8:
        return f"heads are {width} wide; on cuda it takes multiples of 8"
    return unsupported_sizes(q_QNH, k_SKH, sees)


def block(
    q_QNH: torch.Tensor,
    k_SKH: torch.Tensor,
    v_SKH: torch.Tensor,
    sees: Sees,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same as the reference."""
    assert soft_cap is None, "refused"
    q, k, v = (_computable(part) for part in (q_QNH, k_SKH, v_SKH))
    if isinstance(sees, Rectangle):
        attend = partial(_forward, scale, "all", sees.hidden_keys(q.device))
        y, lse = attend(*(part.unsqueeze(0) for part in (q, k, v)))
        return y.squeeze(0).to(q_QNH.dtype), lse.squeeze(0)
    rows = (_rows(part, sees) for part in (q, k, v))
    results = [
        _documents(_forward, chunks.forward, scale, window, *bucket)
        for bucket in zip(_masks(sees), *rows, strict=True)
    ]
    y, lse = (_tokens(parts, sees) for parts in zip(*results, strict=True))
    return y.to(q_QNH.dtype), lse


def block_backward(
    dy_QNH: torch.Tensor,
    q_QNH: torch.Tensor,
    k_SKH: torch.Tensor,
    v_SKH: torch.Tensor,
    y_QNH: torch.Tensor,
    lse_QN: torch.Tensor,
    sees: Sees,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Same as the reference."""
    assert soft_cap is None, "refused"
    dy, q, k, v, y = (_computable(part) for part in (dy_QNH, q_QNH, k_SKH, v_SKH, y_QNH))
    if isinstance(sees, Rectangle):
        parts = (part.unsqueeze(0) for part in (dy, q, k, v, y, lse_QN))
        batched = _backward(scale, "all", sees.hidden_keys(q.device), *parts)
        gradients = tuple(gradient.squeeze(0) for gradient in batched)
    else:
        rows = (_rows(part, sees) for part in (q, k, v, y, lse_QN))
        # Padding repeats a document's last token: with a gradient of 0 it adds nothing to those of
        # keys and values.
        buckets = zip(_masks(sees), _rows(dy, sees, padding="zero"), *rows, strict=True)
        run = partial(_documents, _backward, chunks.backward, scale, window)
        results = [run(*bucket) for bucket in buckets]
        gradients = tuple(_tokens(parts, sees) for parts in zip(*results, strict=True))
    dq, dk, dv = (part.to(q_QNH.dtype) for part in gradients)
    return dq, dk, dv


def _computable(x: torch.Tensor) -> torch.Tensor:
    # CPUs without bf16 matmul units, where the 16-bit kernels are slower than the fp32 one.
    return x.float() if not x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) else x


def _rows(
    x_TN: torch.Tensor, documents: VarlenMetadata, padding: Literal["copied", "zero"] = "copied"
) -> list[torch.Tensor]:
    """The documents of each bucket as a batch, [B, L, ...].

    Padding on the right repeats a document's last token, or is zero.
    """
    layout = documents.layout
    if layout is not None:
        x_TN = x_TN.index_select(0, layout.token_of_slot)
        if padding == "zero":
            x_TN.masked_fill_(layout.is_padding.view(-1, *[1] * (x_TN.ndim - 1)), 0)
    parts = x_TN.split([bucket.num_slots for bucket in documents.buckets])
    return [
        part.unflatten(0, (bucket.num_documents, bucket.width))
        for part, bucket in zip(parts, documents.buckets, strict=True)
    ]


Masks = tuple[torch.Tensor | None, torch.Tensor | None]
"""Start rows and run ends of a bucket's documents [B, L], counted from their first tokens."""


def _masks(documents: VarlenMetadata) -> Sequence[Masks]:
    """The masks of each bucket beyond causal ones and windows."""
    masks: list[list[torch.Tensor] | list[None]] = []
    for mask_T in (documents.start_rows, documents.run_ends):
        if mask_T is None:
            masks.append([None] * len(documents.buckets))
            continue
        lengths, count = documents.cu_seqlens.diff(), documents.num_tokens
        first_T = documents.cu_seqlens[:-1].repeat_interleave(lengths, output_size=count)
        masks.append(_rows(mask_T - first_T, documents))
    starts, ends = masks
    if documents.layout is not None and documents.start_rows is not None:
        # Padding attends to itself: a query without keys would give NaN.
        padding = documents.layout.is_padding.split([b.num_slots for b in documents.buckets])
        starts = [
            start_BL.masked_fill(is_padding.view_as(start_BL), start_BL.shape[1])
            for start_BL, is_padding in zip(starts, padding, strict=True)
            if start_BL is not None
        ]
    return [*zip(starts, ends, strict=True)]


def _documents(
    run: Callable[..., Tensors],
    in_chunks: Callable[..., Tensors],
    scale: float,
    window: int | None,
    masks: Masks,
    *parts: torch.Tensor,
) -> Tensors:
    """What `run` gives of a bucket, from its rows; `in_chunks` calls it for chunks."""
    length, device = parts[0].shape[1], parts[0].device
    if any(mask_BL is not None for mask_BL in masks):
        return run(scale, "all", causal_window_mask(length, window, device, *masks), *parts)
    if window is None or window >= length:
        return run(scale, "past", None, *parts)
    return in_chunks(partial(run, scale, "all"), window, *parts)


def _tokens(rows: Sequence[torch.Tensor], documents: VarlenMetadata) -> torch.Tensor:
    """The tokens of all buckets in their order, without padding."""
    x_TN = torch.cat([part.flatten(0, 1) for part in rows])
    return x_TN if documents.layout is None else x_TN[documents.layout.slot_of_token]


def _forward(
    scale: float,
    keys: Keys,
    hidden_LS: torch.Tensor | None,
    q_BLNH: torch.Tensor,
    k_BSKH: torch.Tensor,
    v_BSKH: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [B, L, N, H] and its log-sum-exp [B, L, N]; keys in `hidden_LS` are masked."""
    q, k, v = (part.transpose(1, 2) for part in (q_BLNH, k_BSKH, v_BSKH))
    causal, bias = keys == "past", _bias(hidden_LS, q)
    if q.is_cuda:
        # The memory-efficient kernel takes as many heads of keys as of queries.
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
        y, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, True, 0.0, causal, scale=scale
        )
        # Its queries are padded to a multiple of CUDA_ROWS.
        lse = lse[..., : q.shape[2]]
    else:
        y, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=bias, scale=scale
        )
    return y.transpose(1, 2), lse.transpose(1, 2)


def _backward(
    scale: float,
    keys: Keys,
    hidden_LS: torch.Tensor | None,
    dy_BLNH: torch.Tensor,
    q_BLNH: torch.Tensor,
    k_BSKH: torch.Tensor,
    v_BSKH: torch.Tensor,
    y_BLNH: torch.Tensor,
    lse_BLN: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tensors = (dy_BLNH, q_BLNH, k_BSKH, v_BSKH, y_BLNH, lse_BLN)
    dy, q, k, v, y, lse = (part.transpose(1, 2) for part in tensors)
    causal, bias = keys == "past", _bias(hidden_LS, q)
    if q.is_cuda:
        grouped = k.shape[1]
        k, v = (part.repeat_interleave(q.shape[1] // grouped, dim=1) for part in (k, v))
        # exp(score - inf) is 0: rows that only fill up add nothing.
        padded = F.pad(lse, (0, -lse.shape[2] % CUDA_ROWS), value=float("inf")).contiguous()
        # Without dropout the RNG state is never read.
        state = torch.zeros((), dtype=torch.int64)
        output_mask = [True, True, True, False]
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            dy, q, k, v, bias, y, padded, state, state, 0.0, output_mask, causal, scale=scale
        )
        dk, dv = (part.unflatten(1, (grouped, -1)).sum(2) for part in (dk, dv))
    else:
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy, q, k, v, y, lse, 0.0, causal, attn_mask=bias, scale=scale
        )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _bias(hidden_LS: torch.Tensor | None, q_BNLH: torch.Tensor) -> torch.Tensor | None:
    """Attention bias for masked keys, for every head: one mask [L, S] for the whole batch, or
    [B, L, S].
    """
    if hidden_LS is None:
        return None
    *rows, queries, keys = hidden_LS.shape
    # Rows are allocated wider, and cut: their stride stays aligned.
    columns = -(-keys // CUDA_COLUMNS) * CUDA_COLUMNS
    bias_LS = q_BNLH.new_zeros((*rows, queries, columns))[..., :keys]
    bias_LS.masked_fill_(hidden_LS, float("-inf"))
    return bias_LS.unsqueeze(-3).expand(*q_BNLH.shape[:2], -1, -1)
