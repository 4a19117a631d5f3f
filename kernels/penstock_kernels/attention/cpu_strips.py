"""Causal attention of documents of one width on a CPU: a strip (block) of queries at a time,
against all keys up to its end.

PyTorch's fused kernel multiplies small tiles itself, at half the speed of BLAS libraries. The
scores of a strip are complete rows, so they are two matmuls and PyTorch's softmax; the backward
pass recomputes them, and nothing quadratic is stored. Scores and their gradients are fp32;
probabilities and gradients of scores are rounded to the inputs' dtype before the next matmul, as
in FlashAttention (arXiv 2307.08691).

B documents, W tokens of each, padded to whole strips; N query heads, K key heads, G = N / K; P
pairs of a document and a key head; n strips of L queries, R = G * L rows of a pair's strip; E keys
up to a strip's end; H head width.
"""

# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from penstock_kernels.attention.segments import LengthBucket

# Queries of a strip: fastest on AVX-512.
QUERIES: Mapping[torch.dtype, int] = {torch.bfloat16: 128, torch.float32: 64}

# Shorter documents are faster in PyTorch's kernel.
SHORTEST = 256

# Bytes of scores at a time. More would not fit the caches.
SCORES = 8 << 20


@cache
def _multiplies(dtype: torch.dtype) -> bool:
    """Whether this CPU has matmul instructions for this dtype."""
    if dtype == torch.bfloat16:
        return bool(torch.cpu.get_capabilities().get("avx512_bf16"))
    return dtype == torch.float32


def should_use(q_SNH: torch.Tensor, k_SKH: torch.Tensor, bucket: LengthBucket) -> bool:
    """Whether strips are faster for the documents of this bucket."""
    if q_SNH.device.type != "cpu" or not _multiplies(q_SNH.dtype) or bucket.width < SHORTEST:
        return False
    # Otherwise not even one pair's scores would stay in the caches.
    rows = q_SNH.shape[1] // k_SKH.shape[1] * QUERIES[q_SNH.dtype]
    return rows * bucket.width * torch.float32.itemsize <= SCORES


def cpu_flash_attention(
    q_SNH: torch.Tensor,
    k_SKH: torch.Tensor,
    v_SKH: torch.Tensor,
    bucket: LengthBucket,
    scale: float,
) -> torch.Tensor:
    """Causal attention within each document of a supported bucket. Returns [S, N, H].

    Inputs have one dtype, which is the result's.
    """
    # Autocast would cast deliberate fp32 operations down.
    with torch.autocast("cpu", enabled=False):
        return _Strips.apply(q_SNH, k_SKH, v_SKH, bucket, scale)


class _Lay(NamedTuple):
    bucket: LengthBucket
    groups: int
    queries: int

    @property
    def num_strips(self) -> int:
        return -(-self.bucket.width // self.queries)

    def padded(self, x_SNH: torch.Tensor) -> torch.Tensor:
        """[B, W, N, H]; padding is zero, and comes after what is seen of anything."""
        x_BWNH = x_SNH.unflatten(0, (self.bucket.num_documents, self.bucket.width))
        missing = self.num_strips * self.queries - self.bucket.width
        return F.pad(x_BWNH, (0, 0, 0, 0, 0, missing)) if missing else x_BWNH

    def rows(self, x_SNH: torch.Tensor) -> torch.Tensor:
        """Of queries: [P, n, R, H]."""
        x = self.padded(x_SNH).unflatten(1, (self.num_strips, self.queries))
        x = x.unflatten(3, (-1, self.groups)).permute(0, 3, 1, 4, 2, 5)  # [B, K, n, G, L, H]
        return x.contiguous().flatten(3, 4).flatten(0, 1)

    def keys(self, x_SKH: torch.Tensor) -> torch.Tensor:
        """Of keys and values: [P, W, H]."""
        return self.padded(x_SKH).transpose(1, 2).contiguous().flatten(0, 1)

    def rows_to_tokens(self, x_PnRH: torch.Tensor) -> torch.Tensor:
        """[S, N, H]."""
        x = x_PnRH.unflatten(2, (self.groups, self.queries)).unflatten(
            0, (self.bucket.num_documents, -1)
        )
        x = x.permute(0, 2, 4, 1, 3, 5)  # [B, n, L, K, G, H]
        return self._without_padding(x.flatten(3, 4).flatten(1, 2))

    def keys_to_tokens(self, x_PWH: torch.Tensor) -> torch.Tensor:
        """[S, K, H]."""
        x_BKWH = x_PWH.unflatten(0, (self.bucket.num_documents, -1))
        return self._without_padding(x_BKWH.transpose(1, 2))

    def _without_padding(self, x_BWNH: torch.Tensor) -> torch.Tensor:
        return x_BWNH[:, : self.bucket.width].flatten(0, 1)


class _Strip(NamedTuple):
    pairs: slice
    number: int
    end: int
    """E."""


class _Walk:
    """All strips of queries q_PnRH in fp32, scaled, and their probabilities."""

    def __init__(self, q_PnRH: torch.Tensor, k_PWH: torch.Tensor, lay: _Lay, low: torch.dtype):
        self._q_PnRH, self._k_PWH, self._lay = q_PnRH, k_PWH, lay
        self.pairs, _, self.rows, _ = q_PnRH.shape
        self.width = k_PWH.shape[1]
        fit = SCORES // (self.rows * self.width * q_PnRH.element_size())
        self.at_once = min(self.pairs, max(fit, torch.get_num_threads()))
        self._scores = self.scratch(q_PnRH.dtype)
        self._rounded = self.scratch(low)
        self._later = q_PnRH.new_full((lay.queries, lay.queries), float("-inf")).triu_(1)

    def scratch(self, dtype: torch.dtype) -> torch.Tensor:
        # Reused by all strips: allocating memory costs a CPU as much as the computation.
        return self._q_PnRH.new_empty(self.at_once * self.rows * self.width, dtype=dtype)

    def rows_of(self, scratch: torch.Tensor, strip: _Strip) -> torch.Tensor:
        """[p, R, E] of it, with p pairs at once."""
        count = strip.pairs.stop - strip.pairs.start
        return scratch[: count * self.rows * strip.end].view(count, self.rows, strip.end)

    def strips(self) -> Iterator[_Strip]:
        for first in range(0, self.pairs, self.at_once):
            pairs = slice(first, min(first + self.at_once, self.pairs))
            for number in range(self._lay.num_strips):
                yield _Strip(pairs, number, (number + 1) * self._lay.queries)

    def probabilities(self, strip: _Strip) -> torch.Tensor:
        """[p, R, E] in fp32."""
        scores = self.rows_of(self._scores, strip)
        keys_pEH = self._k_PWH[strip.pairs, : strip.end]
        torch.bmm(self._q_PnRH[strip.pairs, strip.number], keys_pEH.mT, out=scores)
        queries = self._lay.queries
        # Keys before the strip's own are earlier than all of its queries: only these may be later.
        scores.unflatten(1, (-1, queries))[..., strip.end - queries :].add_(self._later)
        return torch.softmax(scores, -1, out=scores)

    def rounded(self, x_pRE: torch.Tensor, strip: _Strip) -> torch.Tensor:
        """In the dtype of products, until the next is."""
        if x_pRE.dtype == self._rounded.dtype:
            return x_pRE
        return self.rows_of(self._rounded, strip).copy_(x_pRE)


class _Strips(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_SNH: torch.Tensor,
        k_SKH: torch.Tensor,
        v_SKH: torch.Tensor,
        bucket: LengthBucket,
        scale: float,
    ) -> torch.Tensor:
        lay = _Lay(bucket, q_SNH.shape[1] // k_SKH.shape[1], QUERIES[q_SNH.dtype])
        q_PnRH, k_PWH, v_PWH = lay.rows(q_SNH), lay.keys(k_SKH), lay.keys(v_SKH)
        ctx.save_for_backward(q_PnRH, k_PWH, v_PWH)
        ctx.lay, ctx.scale = lay, scale
        y_PnRH = torch.empty_like(q_PnRH)
        walk = _Walk(q_PnRH.float() * scale, k_PWH.float(), lay, q_PnRH.dtype)
        for strip in walk.strips():
            weights = walk.rounded(walk.probabilities(strip), strip)
            index = strip.pairs, strip.number
            y_PnRH[index] = torch.bmm(weights, v_PWH[strip.pairs, : strip.end])
        return lay.rows_to_tokens(y_PnRH)

    @staticmethod
    @once_differentiable
    @torch.autocast("cpu", enabled=False)
    def backward(ctx: Any, dy_SNH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_PnRH, k_PWH, v_PWH = ctx.saved_tensors
        lay: _Lay = ctx.lay
        dy_PnRH = lay.rows(dy_SNH)
        precise_dy_PnRH, precise_v_PWH = dy_PnRH.float(), v_PWH.float()
        dq_PnRH = torch.empty_like(q_PnRH)
        # Each key gets a product from every later strip: the sum of rounded ones is kept in fp32.
        dk_PWH, dv_PWH = (torch.zeros_like(v_PWH, dtype=torch.float32) for _ in range(2))
        walk = _Walk(q_PnRH.float() * ctx.scale, k_PWH.float(), lay, q_PnRH.dtype)
        # Not the memory of the probabilities, which softmax's backward reads beside it.
        slopes = walk.scratch(torch.float32)
        for strip in walk.strips():
            index, keys = (strip.pairs, strip.number), (strip.pairs, slice(strip.end))
            probabilities = walk.probabilities(strip)
            weights = walk.rounded(probabilities, strip)
            dv_PWH[keys].add_(torch.bmm(weights.mT, dy_PnRH[index]))
            slope = walk.rows_of(slopes, strip)
            torch.bmm(precise_dy_PnRH[index], precise_v_PWH[keys].mT, out=slope)
            # In place: the kernel reads a row of gradients before it writes that row.
            torch.ops.aten._softmax_backward_data.out(
                slope, probabilities, -1, slope.dtype, grad_input=slope
            )
            weights = walk.rounded(slope, strip)
            dq_PnRH[index] = torch.bmm(weights, k_PWH[keys])
            dk_PWH[keys].add_(torch.bmm(weights.mT, q_PnRH[index]))
        dq_SNH = lay.rows_to_tokens(dq_PnRH.mul_(ctx.scale))
        dk_SKH = lay.keys_to_tokens(dk_PWH.mul_(ctx.scale))
        dv_SKH = lay.keys_to_tokens(dv_PWH)
        return dq_SNH, dk_SKH.to(q_PnRH.dtype), dv_SKH.to(q_PnRH.dtype), None, None
