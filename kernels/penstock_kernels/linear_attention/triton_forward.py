"""Kernels of linear attention's forward pass; the mathematics is in `chunk.py`."""

# pyright: reportArgumentType=false, reportReturnType=false

import triton
import triton.language as tl

from penstock_kernels.linear_attention.triton_tiles import (
    CHUNK,
    LEVELS,
    decay,
    decays_between,
    dot,
    dot_of_fp32,
    halves,
    load_numbers,
    load_rows,
    load_sums,
    meets,
    store_rows,
)


# Both vary by micro-batch: Triton would compile for multiples of 16, for 1 and for the rest.
@triton.jit(do_not_specialize=["num_documents", "num_chunks"])
def plan(cu_seqlens_ptr, chunks_ptr, firsts_ptr, num_documents, num_chunks, BLOCK: tl.constexpr):
    """Each document's first chunk, [B + 1], and each chunk's first token and length, [chunks, 2]:
    length 0 past the last. A program for each document, and one for the chunks past the last."""
    document = tl.program_id(0)
    first = 0
    # Counted anew by each program, as none waits for another.
    for low in range(0, document, BLOCK):
        index = low + tl.arange(0, BLOCK)
        start = tl.load(cu_seqlens_ptr + index, mask=index < document, other=0)
        end = tl.load(cu_seqlens_ptr + index + 1, mask=index < document, other=0)
        first += tl.sum((end - start + CHUNK - 1) // CHUNK)
    tl.store(firsts_ptr + document, first)
    start = tl.load(cu_seqlens_ptr + document)
    end = start
    count = num_chunks - first
    if document < num_documents:
        end = tl.load(cu_seqlens_ptr + document + 1)
        count = (end - start + CHUNK - 1) // CHUNK
    for low in range(0, count, BLOCK):
        chunk = low + tl.arange(0, BLOCK)
        token = start + chunk * CHUNK
        length = tl.minimum(tl.maximum(end - token, 0), CHUNK)
        tl.store(chunks_ptr + (first + chunk) * 2, token, mask=chunk < count)
        tl.store(chunks_ptr + (first + chunk) * 2 + 1, length, mask=chunk < count)


@triton.jit
def sum_decays(log_decay_ptr, chunks_ptr, sums_ptr, N, width, BLOCK: tl.constexpr):
    """Sums of log decays from their chunk's beginning, fp32: [T, N, width], width 1 or K."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    first = tl.program_id(2) * BLOCK
    start, length = tl.load(chunks_ptr + chunk * 2), tl.load(chunks_ptr + chunk * 2 + 1)
    log_decay = load_rows(log_decay_ptr, start, length, head, N, width, first, BLOCK)
    sums = tl.cumsum(log_decay.to(tl.float32), axis=0)
    store_rows(sums_ptr, sums, start, length, head, N, width, first, BLOCK)


@triton.jit
def make_products(
    q_ptr,
    k_ptr,
    sums_ptr,
    beta_ptr,
    chunks_ptr,
    scores_ptr,
    solution_ptr,
    scale,
    G,
    N,
    K,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """P, and with the delta rule X of (I + A beta) X = A, each [T, N, CHUNK]."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, length = tl.load(chunks_ptr + chunk * 2), tl.load(chunks_ptr + chunk * 2 + 1)
    key_head = head // (N // G)
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    products = tl.zeros([CHUNK, CHUNK], tl.float32)
    for first in range(0, K, BLOCK):
        q = load_rows(q_ptr, start, length, key_head, G, K, first, BLOCK)
        k = load_rows(k_ptr, start, length, key_head, G, K, first, BLOCK)
        if CHANNELS:
            q, k = q.to(tl.float32), k.to(tl.float32)
            sums = load_sums(sums_ptr, row, start, length, head, N, K, first, BLOCK, True)
            # A token is in no half that meets itself, and nothing decays between.
            scores += tl.where(row == column, tl.sum(q * k, axis=1)[:, None], 0.0)
            for level in range(LEVELS):
                is_late, border = halves(row, level)
                at_border = load_sums(
                    sums_ptr, border, start, length, head, N, K, first, BLOCK, True
                )
                to_late = tl.where(is_late, decay(sums - at_border), 0.0)
                early = tl.trans(tl.where(is_late, 0.0, k * decay(at_border - sums)))
                inside = meets(level)
                scores += tl.where(inside, dot(q * to_late, early, k_ptr, UPCAST), 0.0)
                if beta_ptr is not None:
                    products += tl.where(inside, dot(k * to_late, early, k_ptr, UPCAST), 0.0)
        else:
            scores += dot(q, tl.trans(k), k_ptr, UPCAST)
            if beta_ptr is not None:
                products += dot(k, tl.trans(k), k_ptr, UPCAST)
    if not CHANNELS:
        sums = load_sums(sums_ptr, row, start, length, head, N, K, 0, BLOCK, False)
        between = decays_between(sums, length)
        scores *= between
        products = tl.where(row > column, products * between, 0.0)
    store_rows(scores_ptr, scores * scale, start, length, head, N, CHUNK, 0, CHUNK)
    if beta_ptr is not None:
        beta = load_numbers(beta_ptr, start, length, head, N)
        lower = products * tl.trans(beta)
        # The inverse of I + lower by halves, as a block's later half is -D B A.
        inverse = tl.where(row == column, 1.0, 0.0) - tl.where(meets(0), lower, 0.0)
        for level in range(1, LEVELS):
            between_halves = tl.where(meets(level), lower, 0.0)
            below = dot_of_fp32(inverse, between_halves, k_ptr)
            inverse -= dot_of_fp32(below, inverse, k_ptr)
        solution = dot_of_fp32(inverse, products, k_ptr)
        store_rows(solution_ptr, solution, start, length, head, N, CHUNK, 0, CHUNK)


@triton.jit
def scan_states(
    k_ptr,
    v_ptr,
    sums_ptr,
    beta_ptr,
    solution_ptr,
    deltas_ptr,
    initial_ptr,
    chunks_ptr,
    firsts_ptr,
    states_ptr,
    final_ptr,
    G,
    N,
    K,
    V,
    CHANNELS: tl.constexpr,
    SOLVED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """The state before each chunk, [chunks, N, K, V], the final states, and D. SOLVED: D is
    given."""
    document, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first_v = tl.program_id(2) * BLOCK_V
    key_head = head // (N // G)
    row, channel = tl.arange(0, CHUNK)[:, None], tl.arange(0, BLOCK_K)[:, None]
    column = first_v + tl.arange(0, BLOCK_V)[None, :]
    inside = (channel < K) & (column < V)
    in_state = channel * V + column
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if initial_ptr is not None:
        initial_at = initial_ptr + (document * N + head) * K * V + in_state
        state += tl.load(initial_at, mask=inside, other=0).to(tl.float32)
    for chunk in range(tl.load(firsts_ptr + document), tl.load(firsts_ptr + document + 1)):
        start, length = tl.load(chunks_ptr + chunk * 2), tl.load(chunks_ptr + chunk * 2 + 1)
        # In int64: chunks times the numbers of their states may exceed 2^31.
        ptrs = states_ptr + (tl.cast(chunk, tl.int64) * N + head) * K * V + in_state
        tl.store(ptrs, state, mask=inside)
        k = load_rows(k_ptr, start, length, key_head, G, K, 0, BLOCK_K).to(tl.float32)
        sums = load_sums(sums_ptr, row, start, length, head, N, K, 0, BLOCK_K, CHANNELS)
        if beta_ptr is None:
            updates = load_rows(v_ptr, start, length, head, N, V, first_v, BLOCK_V).to(tl.float32)
        else:
            beta = load_numbers(beta_ptr, start, length, head, N)
            if SOLVED:
                deltas = load_rows(deltas_ptr, start, length, head, N, V, first_v, BLOCK_V)
                deltas = deltas.to(tl.float32)
            else:
                v = load_rows(v_ptr, start, length, head, N, V, first_v, BLOCK_V).to(tl.float32)
                residual = v - dot(k * decay(sums), state, k_ptr, UPCAST)
                solution = load_rows(solution_ptr, start, length, head, N, CHUNK, 0, CHUNK)
                deltas = residual - dot(solution, residual * beta, k_ptr, UPCAST)
                store_rows(deltas_ptr, deltas, start, length, head, N, V, first_v, BLOCK_V)
            updates = deltas * beta
        # As a column of channels and as a row of them: no layout is converted in the loop.
        end = tl.zeros([1, 1], tl.int32) + length - 1
        last = load_sums(sums_ptr, end, start, length, head, N, K, 0, BLOCK_K, CHANNELS)
        keys = tl.trans(k * decay(last - sums))
        state = state * tl.trans(decay(last)) + dot(keys, updates, k_ptr, UPCAST)
    if final_ptr is not None:
        tl.store(final_ptr + (document * N + head) * K * V + in_state, state, mask=inside)


@triton.jit
def read_states(
    q_ptr,
    v_ptr,
    sums_ptr,
    beta_ptr,
    deltas_ptr,
    scores_ptr,
    chunks_ptr,
    states_ptr,
    y_ptr,
    scale,
    G,
    N,
    K,
    V,
    CHANNELS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """y."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first_v = tl.program_id(2) * BLOCK_V
    start, length = tl.load(chunks_ptr + chunk * 2), tl.load(chunks_ptr + chunk * 2 + 1)
    row, column = tl.arange(0, CHUNK)[:, None], first_v + tl.arange(0, BLOCK_V)[None, :]
    if beta_ptr is None:
        updates = load_rows(v_ptr, start, length, head, N, V, first_v, BLOCK_V).to(tl.float32)
    else:
        updates = load_rows(deltas_ptr, start, length, head, N, V, first_v, BLOCK_V)
        updates = updates.to(tl.float32) * load_numbers(beta_ptr, start, length, head, N)
    scores = load_rows(scores_ptr, start, length, head, N, CHUNK, 0, CHUNK)
    y = dot(scores, updates, q_ptr, UPCAST)
    for first in range(0, K, BLOCK_K):
        channel = first + tl.arange(0, BLOCK_K)[:, None]
        q = load_rows(q_ptr, start, length, head // (N // G), G, K, first, BLOCK_K)
        sums = load_sums(sums_ptr, row, start, length, head, N, K, first, BLOCK_K, CHANNELS)
        ptrs = states_ptr + (chunk * N + head) * K * V + channel * V + column
        state = tl.load(ptrs, mask=(channel < K) & (column < V) & (length > 0), other=0)
        y += dot(q.to(tl.float32) * scale * decay(sums), state, q_ptr, UPCAST)
    store_rows(y_ptr, y, start, length, head, N, V, first_v, BLOCK_V)
