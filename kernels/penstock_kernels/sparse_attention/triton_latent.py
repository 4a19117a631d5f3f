"""Sparse attention to latent vectors on Triton: only selected keys are read.

A program takes some heads of one token, and gathers the vectors that this token attends to, which
are the same for all of them. In the backward pass the gradients of a vector, which any tokens may
have selected, are added atomically, where their order changes the last bits of the sum; or, for
deterministic sums, written one by one and added in order by a second kernel.
"""

# pyright: reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl


@triton.jit
def _dot(a, b, UPCAST: tl.constexpr):
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    # Not TF32: gradients of fp32 would be off by a thousandth.
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _rows(x_ptr, start, inside, width, WIDTH: tl.constexpr):
    """Rows of x that begin at these elements; zeros for those that are not inside."""
    offs = tl.arange(0, WIDTH)
    mask = inside[:, None] & (offs < width)[None, :]
    return tl.load(x_ptr + start[:, None] + offs[None, :], mask=mask, other=0)


@triton.jit
def _store_rows(x_ptr, x, start, inside, width, WIDTH: tl.constexpr):
    offs = tl.arange(0, WIDTH)
    mask = inside[:, None] & (offs < width)[None, :]
    tl.store(x_ptr + start[:, None] + offs[None, :], x, mask=mask)


@triton.jit
def _add_rows(x_ptr, x, start, inside, width, WIDTH: tl.constexpr):
    offs = tl.arange(0, WIDTH)
    mask = inside[:, None] & (offs < width)[None, :]
    # The default, acq_rel, orders other memory as well, which nobody reads before the kernel ends.
    tl.atomic_add(x_ptr + start[:, None] + offs[None, :], x, mask=mask, sem="relaxed")


@triton.jit
def attend(
    q_ptr,
    q_rope_ptr,
    latent_ptr,
    k_rope_ptr,
    selected_ptr,
    y_ptr,
    log_sum_ptr,
    scale,
    S,
    N,
    R,
    P,
    blocks,
    q_token_stride,
    q_head_stride,
    q_rope_token_stride,
    q_rope_head_stride,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """y [T, N, R], and the log-sum-exp of each head's scores, fp32 [T, N]."""
    token = (tl.program_id(0) // blocks).to(tl.int64)
    head = tl.program_id(0) % blocks * HEADS + tl.arange(0, HEADS)
    is_head, row = head < N, token * N + head
    # Heads may lie far apart: an einsum over heads leaves all tokens of one together.
    far = head.to(tl.int64)
    q = _rows(q_ptr, token * q_token_stride + far * q_head_stride, is_head, R, RANK)
    q_rope_start = token * q_rope_token_stride + far * q_rope_head_stride
    q_rope = _rows(q_rope_ptr, q_rope_start, is_head, P, ROPE)
    largest = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    y = tl.zeros([HEADS, RANK], tl.float32)
    for start in range(0, S, KEYS):
        slot = start + tl.arange(0, KEYS)
        key = tl.load(selected_ptr + token * S + slot, mask=slot < S, other=-1)
        is_key, key = key >= 0, key.to(tl.int64)
        latent = _rows(latent_ptr, key * R, is_key, R, RANK)
        k_rope = _rows(k_rope_ptr, key * P, is_key, P, ROPE)
        scores = _dot(q, tl.trans(latent), UPCAST) + _dot(q_rope, tl.trans(k_rope), UPCAST)
        scores = tl.where(is_key[None, :], scores * scale, float("-inf"))
        # Online softmax (Milakov and Gimelshein 2018): a larger maximum rescales what is summed.
        larger = tl.maximum(largest, tl.max(scores, 1))
        # No key yet: any number will do, and infinities have no difference.
        reference = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp(scores - reference[:, None])
        shrink = tl.exp(largest - reference)
        total = total * shrink + tl.sum(weights, 1)
        y = y * shrink[:, None] + _dot(weights.to(latent.dtype), latent, UPCAST)
        largest = larger
    _store_rows(y_ptr, y / total[:, None], row * R, is_head, R, RANK)
    tl.store(log_sum_ptr + row, largest + tl.log(total), mask=is_head)


@triton.jit
def add_gradients(
    q_ptr,
    q_rope_ptr,
    latent_ptr,
    k_rope_ptr,
    selected_ptr,
    y_ptr,
    dy_ptr,
    log_sum_ptr,
    dq_ptr,
    dq_rope_ptr,
    dkeys_ptr,
    scale,
    S,
    N,
    R,
    P,
    blocks,
    q_token_stride,
    q_head_stride,
    q_rope_token_stride,
    q_rope_head_stride,
    dy_token_stride,
    dy_head_stride,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    IN_ORDER: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """dq [T, N, R] and dq_rope [T, N, P]. Those of keys, latent vectors and features with RoPE side
    by side, are added to dkeys [T, R + P], fp32; IN_ORDER: written, each token's by themselves, to
    dkeys [T, S, blocks, R + P], for `add_in_order`."""
    token = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    head = block * HEADS + tl.arange(0, HEADS)
    is_head, row = head < N, token * N + head
    # Heads may lie far apart: an einsum over heads leaves all tokens of one together.
    far = head.to(tl.int64)
    q = _rows(q_ptr, token * q_token_stride + far * q_head_stride, is_head, R, RANK)
    q_rope_start = token * q_rope_token_stride + far * q_rope_head_stride
    q_rope = _rows(q_rope_ptr, q_rope_start, is_head, P, ROPE)
    dy = _rows(dy_ptr, token * dy_token_stride + far * dy_head_stride, is_head, R, RANK)
    log_sum = tl.load(log_sum_ptr + row, mask=is_head, other=0)
    y = _rows(y_ptr, row * R, is_head, R, RANK)
    # sum_k weight_k dweight_k without a pass over keys: it equals y . dy (Dao et al. 2022,
    # "FlashAttention", appendix B.2).
    delta = tl.sum(y.to(tl.float32) * dy.to(tl.float32), 1)
    dq = tl.zeros([HEADS, RANK], tl.float32)
    dq_rope = tl.zeros([HEADS, ROPE], tl.float32)
    for start in range(0, S, KEYS):
        slot = start + tl.arange(0, KEYS)
        key = tl.load(selected_ptr + token * S + slot, mask=slot < S, other=-1)
        is_key, key = key >= 0, key.to(tl.int64)
        latent = _rows(latent_ptr, key * R, is_key, R, RANK)
        k_rope = _rows(k_rope_ptr, key * P, is_key, P, ROPE)
        scores = _dot(q, tl.trans(latent), UPCAST) + _dot(q_rope, tl.trans(k_rope), UPCAST)
        weights = tl.where(is_key[None, :], tl.exp(scores * scale - log_sum[:, None]), 0.0)
        dweights = _dot(dy, tl.trans(latent), UPCAST)
        dscores = (weights * (dweights - delta[:, None]) * scale).to(latent.dtype)
        dq += _dot(dscores, latent, UPCAST)
        dq_rope += _dot(dscores, k_rope, UPCAST)
        # A latent vector is a value and, by the next line, a key.
        dlatent = _dot(tl.trans(weights.to(latent.dtype)), dy, UPCAST)
        dlatent += _dot(tl.trans(dscores), q, UPCAST)
        dk_rope = _dot(tl.trans(dscores), q_rope, UPCAST)
        if IN_ORDER:
            part = ((token * S + slot) * blocks + block) * (R + P)
            _store_rows(dkeys_ptr, dlatent, part, is_key, R, RANK)
            _store_rows(dkeys_ptr + R, dk_rope, part, is_key, P, ROPE)
        else:
            _add_rows(dkeys_ptr, dlatent, key * (R + P), is_key, R, RANK)
            _add_rows(dkeys_ptr + R, dk_rope, key * (R + P), is_key, P, ROPE)
    _store_rows(dq_ptr, dq, row * R, is_head, R, RANK)
    _store_rows(dq_rope_ptr, dq_rope, row * P, is_head, P, ROPE)


@triton.jit(do_not_specialize=["keys"])
def add_in_order(
    parts_ptr,
    order_ptr,
    starts_ptr,
    dkeys_ptr,
    keys,
    blocks,
    width,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Add the gradients that `add_gradients` has written to dkeys [T, width]. `order` are the pairs
    of a query and a slot, by the selected key, and `starts` [T + 1] each key's first among them."""
    column = tl.arange(0, WIDTH)
    first = tl.program_id(0) * KEYS
    for key in range(first, tl.minimum(first + KEYS, keys)):
        begin = tl.load(starts_ptr + key) * blocks
        end = tl.load(starts_ptr + key + 1) * blocks
        if begin < end:
            ptrs = dkeys_ptr + tl.cast(key, tl.int64) * width + column
            total = tl.load(ptrs, mask=column < width, other=0)
            for low in range(begin, end, PARTS):
                part = low + tl.arange(0, PARTS)
                pair = tl.load(order_ptr + part // blocks, mask=part < end, other=0)
                row = pair * blocks + part % blocks
                total += tl.sum(_rows(parts_ptr, row * width, part < end, width, WIDTH), 0)
            tl.store(ptrs, total, mask=column < width)
