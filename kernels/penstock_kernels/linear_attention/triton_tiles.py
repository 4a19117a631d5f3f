"""Tiles of a chunk on Triton, for the kernels of linear attention.

A tile has a row for each token of a chunk. Rows past the document's end hold zeros.
"""

# pyright: reportArgumentType=false, reportReturnType=false

import triton
import triton.language as tl

CHUNK = tl.constexpr(64)
"""Tokens of a chunk."""
LEVELS = tl.constexpr(6)
"""How often a chunk is halved."""


@triton.jit
def load_rows(
    x_ptr, start, length, head, heads, width, first, BLOCK: tl.constexpr
):  # [CHUNK, BLOCK]
    """Columns from `first` on of a chunk's rows of one head of x [T, heads, width]."""
    row, column = tl.arange(0, CHUNK)[:, None], first + tl.arange(0, BLOCK)[None, :]
    offs = ((start + row).to(tl.int64) * heads + head) * width + column
    return tl.load(x_ptr + offs, mask=(row < length) & (column < width), other=0)


@triton.jit
def store_rows(x_ptr, x, start, length, head, heads, width, first, BLOCK: tl.constexpr):
    """The same, written."""
    row, column = tl.arange(0, CHUNK)[:, None], first + tl.arange(0, BLOCK)[None, :]
    offs = ((start + row).to(tl.int64) * heads + head) * width + column
    tl.store(x_ptr + offs, x, mask=(row < length) & (column < width))


@triton.jit
def load_numbers(x_ptr, start, length, head, heads):
    """A chunk's numbers of one head of x [T, heads], as a column, fp32."""
    row = tl.arange(0, CHUNK)
    offs = (start + row).to(tl.int64) * heads + head
    return tl.load(x_ptr + offs, mask=row < length, other=0).to(tl.float32)[:, None]


@triton.jit
def load_sums(
    sums_ptr,
    row,
    start,
    length,
    head,
    heads,
    width,
    first,
    BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Sums of log decays at rows (a column of their numbers within the chunk): [rows, BLOCK] by
    channel, else [rows, 1]."""
    token = (start + row).to(tl.int64) * heads + head
    if CHANNELS:
        column = first + tl.arange(0, BLOCK)[None, :]
        inside = (row < length) & (column < width)
        return tl.load(sums_ptr + token * width + column, mask=inside, other=0)
    else:
        return tl.load(sums_ptr + token, mask=row < length, other=0)


@triton.jit
def decay(exponent):
    """exp, of 0 or less where rows are tokens."""
    # Rows past the end have a sum of 0: since an earlier border it may overflow, and inf * 0 is
    # NaN.
    return tl.exp(tl.minimum(exponent, 0.0))


@triton.jit
def dot_of_fp32(a, b, like_ptr):
    """A product of tiles in fp32; of results that are rounded to 16 bits, in fewer of its bits."""
    if like_ptr.dtype.element_ty == tl.float32:
        # Three TF32 products are about as exact as one of fp32, which tensor cores do not have.
        return tl.dot(a, b, input_precision="tf32x3")
    else:
        return tl.dot(a, b, input_precision="tf32")


@triton.jit
def dot(a, b, like_ptr, UPCAST: tl.constexpr):
    """A product of tiles in the dtype of a tensor, summed in fp32. UPCAST: the interpreter does not
    multiply bfloat16."""
    a, b = a.to(like_ptr.dtype.element_ty), b.to(like_ptr.dtype.element_ty)
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    # Of fp32: three TF32 products on tensor cores, nearly as exact as fp32.
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def halves(row, level):
    """Whether rows are in the later half of their block of this level, and the last row of its
    earlier half."""
    half = 1 << level
    return (row // half) % 2 == 1, row // (2 * half) * (2 * half) + half - 1


@triton.jit
def meets(level):
    """[CHUNK, CHUNK]: whether a row of a later half meets a column of the same block's earlier."""
    half = 1 << level
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    is_same = row // (2 * half) == column // (2 * half)
    return is_same & ((row // half) % 2 == 1) & ((column // half) % 2 == 0)


@triton.jit
def decays_between(sums, length):
    """[CHUNK, CHUNK] of one decay for all channels: from a column's token to a row's, else 0."""
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    return tl.where((row >= column) & (row < length), decay(sums - tl.trans(sums)), 0.0)
