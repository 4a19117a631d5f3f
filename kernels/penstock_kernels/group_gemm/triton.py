"""group_gemm on Triton: a kernel for rows, forward and backward, and one for weight gradients.

T rows, G groups, K contracted and N output columns. A small kernel computes group offsets on the
device; the grid has the size of the worst case, and the few superfluous programs exit at once. On
GPUs with tensor descriptors (Hopper and later) whole tiles are copied by hardware; elsewhere, and
for unsupported memory layouts, by pointers.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from penstock_kernels.group_gemm import tiles
from penstock_kernels.group_gemm.autograd import operators
from penstock_kernels.group_gemm.shapes import VECTOR, with_unit_stride
from penstock_kernels.launch_sizes import cdiv, next_power_of_2
from penstock_kernels.op import INTERPRETED
from penstock_kernels.tuning import select_config

DESCRIPTORS_SINCE = 9
"""CUDA capability with tensor descriptors."""

# Values that change from step to step are not specialized: kernels would be recompiled.


@triton.jit(do_not_specialize=["G", "T"])
def _plan(counts_ptr, bounds_ptr, G, T, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """For G groups, and the rows past them as group G: first row, end, cumulative tile count."""
    group = tl.arange(0, GROUPS)
    count = tl.load(counts_ptr + group, mask=group < G, other=0).to(tl.int32)
    total = tl.cumsum(count, axis=0)
    start = tl.minimum(total - count, T)
    end = tl.where(group < G, tl.minimum(total, T), T)
    num_tiles = tl.where(group <= G, (end - start + ROWS - 1) // ROWS, 0)
    inside = group <= G
    tl.store(bounds_ptr + group, start, mask=inside)
    tl.store(bounds_ptr + (G + 1) + group, end, mask=inside)
    tl.store(bounds_ptr + 2 * (G + 1) + group, tl.cumsum(num_tiles, axis=0), mask=inside)


@triton.jit
def _place(tile, num_rows, num_columns, BAND: tl.constexpr):
    """Row and column of the `tile`-th tile: down bands of BAND rows, then right."""
    band = tile // (BAND * num_columns)
    height = tl.minimum(num_rows - band * BAND, BAND)
    within = tile % (BAND * num_columns)
    return band * BAND + within % height, within // height


@triton.jit(do_not_specialize=["G", "most_tiles"])
def _by_rows(
    x,
    weight,
    y_ptr,
    bounds_ptr,
    G,
    K,
    N,
    most_tiles,
    x_stride,
    weight_stride_g,
    weight_stride_n,
    weight_stride_k,
    WEIGHT: tl.constexpr,
    COPY: tl.constexpr,
    UPCAST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUPS: tl.constexpr,
    BAND: tl.constexpr,
):
    """One tile of y. `WEIGHT` is the weight's contiguous dimension: contracted or output."""
    row_tile, column_tile = _place(tl.program_id(0), most_tiles, tl.cdiv(N, COLUMNS), BAND)
    groups = tl.arange(0, GROUPS)
    # Lanes past the groups end after every tile, so that they are not counted below.
    tile_ends = tl.load(bounds_ptr + 2 * (G + 1) + groups, mask=groups <= G, other=2147483647)
    group = tl.sum((tile_ends <= row_tile).to(tl.int32), axis=0)
    if group <= G:
        before = tl.load(bounds_ptr + 2 * (G + 1) + group - 1, mask=group > 0, other=0)
        row = tl.load(bounds_ptr + group) + (row_tile - before) * ROWS
        end = tl.load(bounds_ptr + (G + 1) + group)
        rows = row + tl.arange(0, ROWS)
        column = column_tile * COLUMNS
        columns = column + tl.arange(0, COLUMNS)
        acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        # Rows past the groups belong to no matrix: zeros are stored without a product.
        contracted = tl.where(group < G, K, 0)
        if COPY == "pointers":
            # Rows past the end read the last one again: loads need no mask, and the store has one.
            x_rows = x + tl.minimum(rows, end - 1).to(tl.int64)[:, None] * x_stride
            matrix = weight + group.to(tl.int64) * weight_stride_g
            matrix_columns = matrix + columns[None, :] * weight_stride_n
        for depth in range(0, contracted, DEPTH):
            # A tile's values from neighboring rows and columns affect no stored result;
            # past the contracted dimension both operands hold zeros.
            if COPY == "descriptors":
                a = x.load([row, depth])
                if WEIGHT == "contracted":
                    b = weight.load([group, column, depth]).reshape(COLUMNS, DEPTH).T
                else:
                    b = weight.load([group, depth, column]).reshape(DEPTH, COLUMNS)
            else:
                offs = depth + tl.arange(0, DEPTH)
                a = tl.load(x_rows + offs[None, :], mask=(offs < K)[None, :], other=0)
                inside = (offs < K)[:, None] & (columns < N)[None, :]
                b = tl.load(matrix_columns + offs[:, None] * weight_stride_k, mask=inside, other=0)
            if UPCAST:
                a, b = a.to(tl.float32), b.to(tl.float32)
            # By default Triton rounds fp32 operands to TF32.
            acc = tl.dot(a, b, acc, input_precision="ieee")
        y_at = y_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
        inside = (rows < end)[:, None] & (columns < N)[None, :]
        tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T"])
def _of_groups(
    a,
    b,
    a_ptr,
    b_ptr,
    y_ptr,
    ends_ptr,
    T,
    M,
    N,
    COPY: tl.constexpr,
    UPCAST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BAND: tl.constexpr,
):
    """One tile of one group's a^T b, [M, N]."""
    down, across = tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS)
    group = tl.program_id(0) // (down * across)
    row_tile, column_tile = _place(tl.program_id(0) % (down * across), down, across, BAND)
    row, column = row_tile * ROWS, column_tile * COLUMNS
    rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
    end = tl.minimum(tl.load(ends_ptr + group), T)
    full_end = start + (end - start) // DEPTH * DEPTH
    acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for token in range(start, full_end, DEPTH):
        if COPY == "descriptors":
            a_tile, b_tile = a.load([token, row]), b.load([token, column])
        else:
            tokens = (token + tl.arange(0, DEPTH)).to(tl.int64)[:, None]
            a_tile = tl.load(a_ptr + tokens * M + rows[None, :], mask=(rows < M)[None, :], other=0)
            b_tile = tl.load(
                b_ptr + tokens * N + columns[None, :], mask=(columns < N)[None, :], other=0
            )
        if UPCAST:
            a_tile, b_tile = a_tile.to(tl.float32), b_tile.to(tl.float32)
        acc = tl.dot(a_tile.T, b_tile, acc, input_precision="ieee")
    if full_end < end:
        # Rows of the next group are contracted here, and would be added: only here are rows masked.
        tokens = (full_end + tl.arange(0, DEPTH)).to(tl.int64)[:, None]
        is_own = tokens < end
        a_tile = tl.load(
            a_ptr + tokens * M + rows[None, :], mask=is_own & (rows < M)[None, :], other=0
        )
        b_tile = tl.load(
            b_ptr + tokens * N + columns[None, :], mask=is_own & (columns < N)[None, :], other=0
        )
        if UPCAST:
            a_tile, b_tile = a_tile.to(tl.float32), b_tile.to(tl.float32)
        acc = tl.dot(a_tile.T, b_tile, acc, input_precision="ieee")
    y_at = y_ptr + group.to(tl.int64) * M * N + rows.to(tl.int64)[:, None] * N + columns[None, :]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=inside)


def _take_descriptors(*tensors: torch.Tensor) -> bool:
    """Whether tensor descriptors support these: last dimension contiguous, other strides in
    vectors.
    """
    for tensor in tensors:
        *outer, last = tensor.stride()
        apart = [stride * tensor.element_size() % VECTOR for stride in outer]
        begins = tensor.storage_offset() * tensor.element_size() % VECTOR
        if last != 1 or any(apart) or begins:
            return False
    if INTERPRETED:
        return True
    capability = torch.cuda.get_device_capability(tensors[0].device)
    return torch.version.hip is None and capability[0] >= DESCRIPTORS_SINCE


def by_rows(x_TK: torch.Tensor, weight_GNK: torch.Tensor, counts_G: torch.Tensor) -> torch.Tensor:
    """Each group's rows times its own matrix, [T, N]; zeros for rows past the groups."""
    x_TK, weight_GNK = x_TK.contiguous(), with_unit_stride(weight_GNK)
    (T, K), (G, N, _) = x_TK.shape, weight_GNK.shape
    y_TN = torch.empty(T, N, dtype=x_TK.dtype, device=x_TK.device)
    if not y_TN.numel():
        return y_TN
    counts_G = counts_G.contiguous()
    weight = "contracted" if weight_GNK.stride(-1) == 1 else "resulting"
    # A descriptor's last dimension is the contiguous one.
    stored = weight_GNK if weight == "contracted" else weight_GNK.mT
    copy = "descriptors" if _take_descriptors(x_TK, stored) else "pointers"

    def launch(tile: tiles.Tiles) -> None:
        groups = next_power_of_2(G + 1)
        bounds = torch.empty(3, G + 1, dtype=torch.int32, device=x_TK.device)
        _plan[(1,)](counts_G, bounds, G, T, ROWS=tile.rows, GROUPS=groups)
        # Every group, and the rows past them, may end in a tile that is not full.
        most_tiles = T // tile.rows + min(G + 1, T)
        x, w = x_TK, weight_GNK
        if copy == "descriptors":
            x = TensorDescriptor.from_tensor(x_TK, [tile.rows, tile.depth])
            block = [tile.columns, tile.depth]
            block = block if weight == "contracted" else block[::-1]
            w = TensorDescriptor.from_tensor(stored, [1, *block])
        _by_rows[(most_tiles * cdiv(N, tile.columns),)](
            *(x, w, y_TN, bounds, G, K, N, most_tiles, x_TK.stride(0), *weight_GNK.stride()),
            WEIGHT=weight,
            COPY=copy,
            UPCAST=INTERPRETED,  # bfloat16 products need it in the interpreter
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            GROUPS=groups,
            BAND=tiles.BAND,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    several = tiles.candidates(tiles.by_rows(x_TK, G), x_TK)
    launch(select_config(_by_rows, x_TK, (T, G, N, K), several, launch, f"{weight} {copy}"))
    return y_TN


def of_groups(a_TM: torch.Tensor, b_TN: torch.Tensor, counts_G: torch.Tensor) -> torch.Tensor:
    """a^T b over each group's rows, [G, M, N]; zeros for a group without rows."""
    a_TM, b_TN = a_TM.contiguous(), b_TN.contiguous()
    (T, M), N, G = a_TM.shape, b_TN.shape[1], counts_G.shape[0]
    y_GMN = torch.empty(G, M, N, dtype=a_TM.dtype, device=a_TM.device)
    if not T or not y_GMN.numel():
        return y_GMN.zero_()
    ends_G = counts_G.cumsum(0, dtype=torch.int32)
    copy = "descriptors" if _take_descriptors(a_TM, b_TN) else "pointers"

    def launch(tile: tiles.Tiles) -> None:
        a, b = a_TM, b_TN
        if copy == "descriptors":
            a = TensorDescriptor.from_tensor(a_TM, [tile.depth, tile.rows])
            b = TensorDescriptor.from_tensor(b_TN, [tile.depth, tile.columns])
        _of_groups[(G * cdiv(M, tile.rows) * cdiv(N, tile.columns),)](
            *(a, b, a_TM, b_TN, y_GMN, ends_G, T, M, N),
            COPY=copy,
            UPCAST=INTERPRETED,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            BAND=tiles.BAND,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    several = tiles.candidates(tiles.of_groups(a_TM), a_TM)
    launch(select_config(_of_groups, a_TM, (T, G, M, N), several, launch, copy))
    return y_GMN


PRODUCTS = operators("triton", by_rows, of_groups)
group_gemm = PRODUCTS.by_rows
