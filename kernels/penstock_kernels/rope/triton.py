"""rope on Triton: a program rotates all heads of a token, queries and keys, and reads each once.

Backward rotates gradients by the negative angles, with the same kernel.
"""

# pyright: reportArgumentType=false, reportReturnType=false

from typing import Any

import torch
import triton
import triton.language as tl

from penstock_kernels.custom_op import fake_like, keep_inputs, operator
from penstock_kernels.launch_sizes import next_power_of_2
from penstock_kernels.rope.reference import Pairs

TILE = 2048
"""Pairs of features that a program rotates at a time."""


@triton.jit
def _heads(
    x_ptr,
    y_ptr,
    cos,
    sin,
    heads,
    token_stride,
    head_stride,
    H,
    R,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    PAIR: tl.constexpr,
    REST: tl.constexpr,
):
    """The heads of one token: pairs are rotated, and the other features copied."""
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, PAIR)
    if PAIRS == "halves":
        first, second = pair, pair + R // 2
    else:
        first, second = 2 * pair, 2 * pair + 1
    for start in range(0, heads, HEADS):
        head = (start + tl.arange(0, HEADS))[:, None]
        x_head = x_ptr + token * token_stride + head * head_stride
        y_head = y_ptr + (token * heads + head) * H
        inside = (head < heads) & (pair < R // 2)[None, :]
        x0 = tl.load(x_head + first[None, :], mask=inside, other=0).to(tl.float32)
        x1 = tl.load(x_head + second[None, :], mask=inside, other=0).to(tl.float32)
        tl.store(y_head + first[None, :], x0 * cos - x1 * sin, mask=inside)
        tl.store(y_head + second[None, :], x1 * cos + x0 * sin, mask=inside)
        if REST:
            offs = R + tl.arange(0, REST)[None, :]
            still = (head < heads) & (offs < H)
            tl.store(y_head + offs, tl.load(x_head + offs, mask=still), mask=still)


@triton.jit
def _turn(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    turned_q_ptr,
    turned_k_ptr,
    N,
    K,
    H,
    R,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    PAIRS: tl.constexpr,
    BACK: tl.constexpr,
    HEADS: tl.constexpr,
    PAIR: tl.constexpr,
    REST: tl.constexpr,
):
    # Offsets of 64 bits: tokens times features of all heads may exceed 2^31.
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, PAIR)
    # Angles are stored twice; each is read at its pair's first feature.
    offs = pair if PAIRS == "halves" else 2 * pair
    inside = pair < R // 2
    cos = tl.load(cos_ptr + token * R + offs, mask=inside, other=0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * R + offs, mask=inside, other=0).to(tl.float32)[None, :]
    if BACK:
        sin = -sin
    _heads(
        q_ptr,
        turned_q_ptr,
        cos,
        sin,
        N,
        q_token_stride,
        q_head_stride,
        H,
        R,
        PAIRS,
        HEADS,
        PAIR,
        REST,
    )
    _heads(
        k_ptr,
        turned_k_ptr,
        cos,
        sin,
        K,
        k_token_stride,
        k_head_stride,
        H,
        R,
        PAIRS,
        HEADS,
        PAIR,
        REST,
    )


def tile(num_heads: int, width: int, turning: int) -> dict[str, int]:
    """Heads, pairs and unrotated features that a program processes at a time."""
    pairs = next_power_of_2(turning // 2)
    heads = min(next_power_of_2(num_heads), max(1, TILE // pairs))
    passed = next_power_of_2(width - turning) if turning < width else 0
    return {"HEADS": heads, "PAIR": pairs, "REST": passed}


def _turned(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pairs: str,
    back: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    turned_q, turned_k = q.new_empty(q.shape), k.new_empty(k.shape)
    # Heads are read by their strides, such as from a fused projection: only features must lie side
    # by side.
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    T, N, H = q.shape
    K, R = k.shape[1], cos.shape[1]
    if T:
        _turn[(T,)](
            *(q, k, cos.contiguous(), sin.contiguous(), turned_q, turned_k),
            *(N, K, H, R, *q.stride()[:2], *k.stride()[:2]),
            PAIRS=pairs,
            BACK=back,
            **tile(max(N, K, 1), H, R),
        )
    return turned_q, turned_k


def _turn_back(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    pairs, back = ctx.options
    # The transpose of a rotation is the rotation by the negative angle.
    return *_turned_of(dq, dk, *ctx.saved_tensors, pairs, not back), None, None, None, None


# A rotation is linear: its gradient needs neither q nor k.
_turned_of = operator(
    "rope", _turned, fake=fake_like(0, 1), keep=keep_inputs(4, first=2), backward=_turn_back
)


def rope(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    pairs: Pairs = "halves",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same as the reference; rounded once, from fp32."""
    return _turned_of(q_TNH, k_TKH, cos_TR, sin_TR, pairs, False)
