"""attention through PyTorch's flex_attention, for cases that its variable-length kernel does not
support: soft caps, start rows, and bidirectional runs of tokens. One call for the whole
micro-batch; fully masked blocks are skipped.

T tokens; N query heads, K key/value heads, H head width; n blocks of the T tokens.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from penstock_kernels.attention.mask import visible_counts
from penstock_kernels.attention.segments import VarlenMetadata
from penstock_kernels.attention.sinks import with_sinks

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# The default of flex_attention (_DEFAULT_SPARSE_BLOCK_SIZE, torch 2.13).
BLOCK = 128
"""Tokens in a block, of queries and of keys."""
# Minimum head width of its kernels' matrix units.
NARROWEST = 16


def unsupported_width(q_TNH: torch.Tensor) -> str | None:
    """Heads too narrow for it."""
    if q_TNH.shape[-1] >= NARROWEST:
        return None
    return (
        f"heads are {q_TNH.shape[-1]} wide; with soft caps, start rows or bidirectional runs"
        f" it takes {NARROWEST} up"
    )


def flex(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    segments: VarlenMetadata,
    scale: float,
    window: int | None,
    sinks_N: torch.Tensor | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """Same as the reference. On CPUs it is not compiled, and has no gradients."""
    # Imported late: it imports the compiler, which takes a second.
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention  # noqa: PLC0415

    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q_TNH, k_TKH, v_TKH))
    # A compiled model compiles it with the rest.
    is_compiled = q.is_cuda and not torch.compiler.is_compiling()
    run: Callable[..., Any] = _compiled() if is_compiled else flex_attention
    y_1NTH, aux = run(
        q,
        k,
        v,
        score_mod=None if soft_cap is None else capped(soft_cap),
        block_mask=blocks(segments, segments.effective_window(window)),
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=sinks_N is not None),
    )
    y_TNH = y_1NTH.squeeze(0).transpose(0, 1)
    return y_TNH if sinks_N is None else with_sinks(y_TNH, aux.lse.squeeze(0).t(), sinks_N)[0]


@cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention  # noqa: PLC0415

    # As it is, flex_attention computes the whole matrix of scores.
    return torch.compile(flex_attention)


def capped(soft_cap: float) -> Callable[..., torch.Tensor]:
    """What is made of a score, as flex_attention asks for it."""

    def within(score: torch.Tensor, *indices: torch.Tensor) -> torch.Tensor:
        del indices
        return (score / soft_cap).tanh() * soft_cap

    return within


def blocks(segments: VarlenMetadata, window: int | None) -> "BlockMask":
    """The block mask. Computed once for each window."""
    if ("flex", window) not in segments.memo:
        segments.memo["flex", window] = _blocks(segments, window)
    return segments.memo["flex", window]


def _blocks(segments: VarlenMetadata, window: int | None) -> "BlockMask":
    from torch.nn.attention.flex_attention import BlockMask  # noqa: PLC0415

    total, start_T, end_T = segments.num_tokens, segments.start_rows, segments.run_ends
    lengths = segments.cu_seqlens.diff()
    document_T = torch.arange(len(lengths), device=lengths.device).repeat_interleave(
        lengths, output_size=total
    )

    depth_T = None
    if start_T is not None and window is not None:
        last_T = segments.cu_seqlens[1:].repeat_interleave(lengths, output_size=total)
        depth_T = visible_counts(torch.minimum(start_T, last_T))

    def sees(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        del batch, head
        within = key <= query if end_T is None else key < end_T[query]
        visible = (document_T[query] == document_T[key]) & within
        if window is not None:
            back = query - key if depth_T is None else depth_T[query] - depth_T[key]
            visible = visible & (back < window)
        return visible if start_T is None else visible & (query < start_T[key])

    document_nB = _in_blocks(document_T)
    first_n, last_n = document_nB.amin(1), document_nB.amax(1)
    at_n = torch.arange(len(first_n), device=lengths.device)
    query_n1, key_n = at_n.unsqueeze(1), at_n
    back_nn = (query_n1 - key_n) * BLOCK
    # Documents lie in order: two blocks share one if the earlier one's last is the later one's
    # first, and hold but one if its first is the later one's last.
    some_nn = back_nn >= 0
    if end_T is not None:
        some_nn = key_n * BLOCK < _in_blocks(end_T).amax(1, keepdim=True)
    some_nn &= last_n >= first_n.unsqueeze(1)
    every_nn = (back_nn > 0) & (first_n == last_n.unsqueeze(1))
    # Indices past the last token occur.
    every_nn &= (query_n1 + 1) * BLOCK <= total
    if window is not None:
        nearest_nn, farthest_nn = back_nn - (BLOCK - 1), back_nn + (BLOCK - 1)
        if depth_T is not None:
            depth_nB = _in_blocks(depth_T)
            least_n, most_n = depth_nB.amin(1), depth_nB.amax(1)
            nearest_nn = least_n.unsqueeze(1) - most_n
            farthest_nn = most_n.unsqueeze(1) - least_n
        some_nn &= nearest_nn < window
        every_nn &= farthest_nn < window
    if start_T is not None:
        start_nB = _in_blocks(start_T)
        some_nn &= query_n1 * BLOCK < start_nB.amax(1)
        every_nn &= query_n1 * BLOCK + (BLOCK - 1) < start_nB.amin(1)
    # Not `create_block_mask`, which evaluates the mask for every pair of tokens.
    return BlockMask.from_kv_blocks(
        *_listed(some_nn & ~every_nn),
        *_listed(every_nn),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(total, total),
    )


def _in_blocks(x_T: torch.Tensor) -> torch.Tensor:
    """[n, BLOCK], the last value repeated to the end of the last block."""
    slots = -(-len(x_T) // BLOCK) * BLOCK
    return x_T[torch.arange(slots, device=x_T.device).clamp_(max=len(x_T) - 1)].view(-1, BLOCK)


def _listed(chosen_nn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks of keys are chosen for each of queries, and which: these come first."""
    counts_n = chosen_nn.sum(1, dtype=torch.int32)
    order_nn = chosen_nn.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return counts_n[None, None], order_nn.to(torch.int32)[None, None].contiguous()
