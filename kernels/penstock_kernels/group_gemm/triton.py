"""group_gemm on Triton: a kernel for rows, forward and backward, and one for weight gradients.

T rows, G groups, K contracted and N output columns. A small kernel computes group offsets on the
device, and as many programs as run at once walk the tiles of all groups. On GPUs with tensor
descriptors (Hopper and later) whole tiles are copied by hardware; elsewhere, and for unsupported
memory layouts, by pointers.

For the experts of an MoE layer (`expert_mlp`) both kernels can read rows by index instead of one
after another, and the first adds biases and computes gates.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

from typing import Literal, NamedTuple

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
def _plan(
    counts_ptr, bounds_ptr, G, T, PAST: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr
):
    """For G groups, and the rows past them as group G: first row, end, cumulative tile count. Rows
    past the groups have tiles with PAST alone."""
    group = tl.arange(0, GROUPS)
    count = tl.load(counts_ptr + group, mask=group < G, other=0).to(tl.int32)
    total = tl.cumsum(count, axis=0)
    start = tl.minimum(total - count, T)
    end = tl.where(group < G, tl.minimum(total, T), T)
    num_tiles = tl.where(group < G + PAST, (end - start + ROWS - 1) // ROWS, 0)
    inside = group <= G
    tl.store(bounds_ptr + group, start, mask=inside)
    tl.store(bounds_ptr + (G + 1) + group, end, mask=inside)
    tl.store(bounds_ptr + 2 * (G + 1) + group, tl.cumsum(num_tiles, axis=0), mask=inside)


@triton.jit
def gated_product(gate, up, alpha, limit, GATE: tl.constexpr):
    """`silu(gate) * up`, or gpt-oss's product of clamped factors."""
    if GATE == "clamped":
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1
        return up * gate * tl.sigmoid(alpha * gate)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _place(tile, num_rows, num_columns, BAND: tl.constexpr):
    """Row and column of the `tile`-th tile: down bands of BAND rows, then right."""
    band = tile // (BAND * num_columns)
    height = tl.minimum(num_rows - band * BAND, BAND)
    within = tile % (BAND * num_columns)
    return band * BAND + within % height, within // height


@triton.jit
def _columns(column_tile, N, HALVES: tl.constexpr, COLUMNS: tl.constexpr):
    """The first column of a tile, the columns of its lanes, and which of them there are."""
    lanes = tl.arange(0, COLUMNS)
    if HALVES:
        # A half of the tile's columns of gates, and the other one of the same features' ups.
        column = column_tile * (COLUMNS // 2)
        features = column + lanes % (COLUMNS // 2)
        columns = lanes // (COLUMNS // 2) * (N // 2) + features
        has_column = features < N // 2
    else:
        column = column_tile * COLUMNS
        columns = column + lanes
        has_column = columns < N
    return column, columns, has_column


@triton.jit
def _described(
    weight,
    group,
    column,
    depth,
    WEIGHT: tl.constexpr,
    HALVES: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """A tile of a group's matrix by descriptors, [DEPTH, COLUMNS]."""
    if HALVES:
        tile = weight.load([group, 0, column, depth]).reshape(COLUMNS, DEPTH).T
    elif WEIGHT == "contracted":
        tile = weight.load([group, column, depth]).reshape(COLUMNS, DEPTH).T
    else:
        tile = weight.load([group, depth, column]).reshape(DEPTH, COLUMNS)
    return tile


@triton.jit
def _gated(y, alpha, limit, GATE: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr):
    """The gated features of a tile of y, as it is stored: the backward pass reads that."""
    y = y.to(tl.float32)
    if GATE == "clamped":
        pairs = y.reshape(ROWS, FEATURES, 2)
    else:
        pairs = y.reshape(ROWS, 2, FEATURES).permute(0, 2, 1)
    gate, up = tl.split(pairs)
    return gated_product(gate, up, alpha, limit, GATE)


@triton.jit(do_not_specialize=["G"])
def _by_rows(
    x,
    weight,
    bias_ptr,
    copies_ptr,
    y_ptr,
    gated_ptr,
    bounds_ptr,
    G,
    K,
    N,
    per_token,
    x_stride,
    weight_stride_g,
    weight_stride_n,
    weight_stride_k,
    alpha,
    limit,
    WEIGHT: tl.constexpr,
    X_COPY: tl.constexpr,
    WEIGHT_COPY: tl.constexpr,
    GATE: tl.constexpr,
    UPCAST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUPS: tl.constexpr,
    BAND: tl.constexpr,
):
    """Tiles of y, and with a GATE of its gated features. `WEIGHT` is the weight's contiguous
    dimension: contracted or output. With copies, row r of x is `copies[r] // per_token`."""
    # Gates are the first half of the weight's outputs, or alternate with ups ("clamped").
    HALVES: tl.constexpr = GATE == "silu"
    FEATURES: tl.constexpr = COLUMNS // 2
    num_columns = tl.cdiv(N // 2, FEATURES) if HALVES else tl.cdiv(N, COLUMNS)
    groups = tl.arange(0, GROUPS)
    # Lanes past the groups end after every tile, so that they are not counted below.
    tile_ends = tl.load(bounds_ptr + 2 * (G + 1) + groups, mask=groups <= G, other=2147483647)
    num_rows = tl.load(bounds_ptr + 2 * (G + 1) + G)
    for tile in tl.range(tl.program_id(0), num_rows * num_columns, tl.num_programs(0)):
        row_tile, column_tile = _place(tile, num_rows, num_columns, BAND)
        group = tl.sum((tile_ends <= row_tile).to(tl.int32), axis=0)
        before = tl.load(bounds_ptr + 2 * (G + 1) + group - 1, mask=group > 0, other=0)
        row = tl.load(bounds_ptr + group) + (row_tile - before) * ROWS
        end = tl.load(bounds_ptr + (G + 1) + group)
        rows = row + tl.arange(0, ROWS)
        column, columns, has_column = _columns(column_tile, N, HALVES, COLUMNS)
        acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        # Rows past the groups belong to no matrix: zeros are stored without a product.
        contracted = tl.where(group < G, K, 0)
        if X_COPY == "pointers":
            # Rows past the end read the last one again: loads need no mask, and the store has one.
            x_row = tl.minimum(rows, end - 1).to(tl.int64)
            if copies_ptr is not None:
                x_row = tl.load(copies_ptr + x_row) // per_token
            x_rows = x + x_row[:, None] * x_stride
        if WEIGHT_COPY == "pointers":
            matrix = weight + group.to(tl.int64) * weight_stride_g
            matrix_columns = matrix + columns.to(tl.int64)[None, :] * weight_stride_n
        for depth in range(0, contracted, DEPTH):
            # A tile's values from neighboring rows and columns affect no stored result;
            # past the contracted dimension both operands hold zeros.
            offs = depth + tl.arange(0, DEPTH)
            if X_COPY == "descriptors":
                a = x.load([row, depth])
            else:
                a = tl.load(x_rows + offs[None, :], mask=(offs < K)[None, :], other=0)
            if WEIGHT_COPY == "descriptors":
                b = _described(weight, group, column, depth, WEIGHT, HALVES, COLUMNS, DEPTH)
            else:
                inside = (offs < K)[:, None] & has_column[None, :]
                b = tl.load(matrix_columns + offs[:, None] * weight_stride_k, mask=inside, other=0)
            if UPCAST:
                a, b = a.to(tl.float32), b.to(tl.float32)
            # By default Triton rounds fp32 operands to TF32.
            acc = tl.dot(a, b, acc, input_precision="ieee")
        if bias_ptr is not None:
            bias_at = bias_ptr + group.to(tl.int64) * N + columns
            bias = tl.load(bias_at, mask=has_column & (group < G), other=0)
            acc += bias.to(tl.float32)[None, :]
        y = acc.to(y_ptr.dtype.element_ty)
        y_at = y_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
        tl.store(y_at, y, mask=(rows < end)[:, None] & has_column[None, :])
        if GATE != "":
            gated = _gated(y, alpha, limit, GATE, ROWS, FEATURES)
            outs = column_tile * FEATURES + tl.arange(0, FEATURES)
            gated_at = gated_ptr + rows.to(tl.int64)[:, None] * (N // 2) + outs[None, :]
            inside = (rows < end)[:, None] & (outs < N // 2)[None, :]
            tl.store(gated_at, gated.to(gated_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _group_tile(
    x,
    x_ptr,
    copies_ptr,
    token,
    end,
    column,
    width,
    per_token,
    COPY: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """DEPTH rows from `token` on and columns from `column` on, by descriptors or by pointers; with
    "copies" of the rows' copies. Rows from `end` on are zeros, if they are not by descriptors."""
    if COPY == "descriptors":
        return x.load([token, column])
    tokens = token + tl.arange(0, DEPTH)
    columns = column + tl.arange(0, COLUMNS)
    is_own = tokens < end
    rows = tokens.to(tl.int64)
    if COPY == "copies":
        rows = tl.load(copies_ptr + rows, mask=is_own, other=0) // per_token
    inside = is_own[:, None] & (columns < width)[None, :]
    return tl.load(x_ptr + rows[:, None] * width + columns[None, :], mask=inside, other=0)


@triton.jit(do_not_specialize=["T"])
def _of_groups(
    a,
    b,
    a_ptr,
    b_ptr,
    copies_ptr,
    y_ptr,
    ends_ptr,
    T,
    M,
    N,
    per_token,
    A_COPY: tl.constexpr,
    B_COPY: tl.constexpr,
    UPCAST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BAND: tl.constexpr,
):
    """One tile of one group's a^T b, [M, N]. With copies, row r of a or of b is
    `copies[r] // per_token`."""
    down, across = tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS)
    group = tl.program_id(0) // (down * across)
    row_tile, column_tile = _place(tl.program_id(0) % (down * across), down, across, BAND)
    row, column = row_tile * ROWS, column_tile * COLUMNS
    rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
    end = tl.minimum(tl.load(ends_ptr + group), T)
    full_end = start + (end - start) // DEPTH * DEPTH
    # Copies are the last tile's without a mask, too.
    A_LAST: tl.constexpr = "pointers" if A_COPY == "descriptors" else A_COPY
    B_LAST: tl.constexpr = "pointers" if B_COPY == "descriptors" else B_COPY
    acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for token in range(start, full_end, DEPTH):
        a_tile = _group_tile(
            a, a_ptr, copies_ptr, token, full_end, row, M, per_token, A_COPY, DEPTH, ROWS
        )
        b_tile = _group_tile(
            b, b_ptr, copies_ptr, token, full_end, column, N, per_token, B_COPY, DEPTH, COLUMNS
        )
        if UPCAST:
            a_tile, b_tile = a_tile.to(tl.float32), b_tile.to(tl.float32)
        acc = tl.dot(a_tile.T, b_tile, acc, input_precision="ieee")
    if full_end < end:
        # Rows of the next group are contracted here, and would be added: only here are rows masked.
        a_tile = _group_tile(
            a, a_ptr, copies_ptr, full_end, end, row, M, per_token, A_LAST, DEPTH, ROWS
        )
        b_tile = _group_tile(
            b, b_ptr, copies_ptr, full_end, end, column, N, per_token, B_LAST, DEPTH, COLUMNS
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


class Bounds(NamedTuple):
    """Where the tiles of each group's rows are."""

    bounds: torch.Tensor
    """int32 [3, G + 1]: first row, end and cumulative tiles of each group, and of rows past all."""
    tile: tiles.Tiles
    num_rows: int

    @classmethod
    def of_tensor(cls, bounds: torch.Tensor, num_rows: int, like: torch.Tensor) -> "Bounds":
        """Those of a plan whose tensor was kept."""
        return cls(bounds, tiles.by_rows(like, num_rows, bounds.shape[1] - 1), num_rows)

    @property
    def ends_G(self) -> torch.Tensor:  # noqa: N802 - G names the dimension
        """The end of each group's rows, int32 [G]."""
        return self.bounds[1, :-1]


def plan(counts_G: torch.Tensor, num_rows: int, like: torch.Tensor, *, past: bool) -> Bounds:
    """The tiles of groups with these counts among so many rows; rows `past` the groups have tiles
    too, of zeros."""
    G = counts_G.shape[0]
    bounds = torch.empty(3, G + 1, dtype=torch.int32, device=like.device)
    planned = Bounds.of_tensor(bounds, num_rows, like)
    sizes = {"PAST": int(past), "ROWS": planned.tile.rows, "GROUPS": next_power_of_2(G + 1)}
    _plan[(1,)](counts_G.contiguous(), bounds, G, num_rows, **sizes)
    return planned


def multiply_rows(
    x_TK: torch.Tensor,
    weight_GNK: torch.Tensor,
    bounds: Bounds,
    *,
    bias_GN: torch.Tensor | None = None,
    copies: torch.Tensor | None = None,
    per_token: int = 1,
    gate: str = "",
    alpha: float = 1.0,
    limit: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each group's rows times its own matrix, [R, N], and its gated features, [R, N / 2], which are
    empty without a gate. With `copies`, row r is row `copies[r] // per_token` of x."""
    x_TK, weight_GNK = x_TK.contiguous(), with_unit_stride(weight_GNK)
    G, N, K = weight_GNK.shape
    R = bounds.num_rows
    y_RN, gated = x_TK.new_empty(R, N), x_TK.new_empty(R if gate else 0, N // 2)
    if not y_RN.numel():
        return y_RN, gated
    halves = gate == "silu"
    weight = "contracted" if weight_GNK.stride(-1) == 1 else "resulting"
    # A descriptor's last dimension is the contiguous one.
    stored = weight_GNK if weight == "contracted" else weight_GNK.mT
    x_copy = "descriptors" if copies is None and _take_descriptors(x_TK) else "pointers"
    # Halves of contiguous outputs would lie apart in a descriptor's rows.
    is_whole = weight == "contracted" or not halves
    weight_copy = "descriptors" if is_whole and _take_descriptors(stored) else "pointers"

    def launch(tile: tiles.Tiles) -> None:
        # Every group, and the rows past them, may end in a tile that is not full.
        most_tiles = (R // tile.rows + min(G + 1, R)) * cdiv(N, tile.columns) + 1
        x, w = x_TK, weight_GNK
        if x_copy == "descriptors":
            x = TensorDescriptor.from_tensor(x_TK, [tile.rows, tile.depth])
        if weight_copy == "descriptors":
            block = [tile.columns, tile.depth]
            if halves:
                both = stored.view(G, 2, N // 2, K)
                w = TensorDescriptor.from_tensor(both, [1, 2, tile.columns // 2, tile.depth])
            else:
                block = block if weight == "contracted" else block[::-1]
                w = TensorDescriptor.from_tensor(stored, [1, *block])
        _by_rows[(min(most_tiles, tiles.programs(tile, x_TK)),)](
            *(x, w, None if bias_GN is None else bias_GN.contiguous(), copies, y_RN),
            *(gated if gate else None, bounds.bounds, G, K, N, per_token),
            *(x_TK.stride(0), *weight_GNK.stride(), alpha, limit),
            WEIGHT=weight,
            X_COPY=x_copy,
            WEIGHT_COPY=weight_copy,
            GATE=gate,
            UPCAST=INTERPRETED,  # bfloat16 products need it in the interpreter
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            GROUPS=next_power_of_2(G + 1),
            BAND=tiles.BAND,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    several = tiles.candidates(bounds.tile, x_TK)
    kind = f"{weight} {x_copy} {weight_copy} {gate}"
    launch(select_config(_by_rows, x_TK, (R, G, N, K), several, launch, kind))
    return y_RN, gated


def multiply_groups(
    a_TM: torch.Tensor,
    b_TN: torch.Tensor,
    ends_G: torch.Tensor,
    *,
    num_rows: int,
    copies: torch.Tensor | None = None,
    per_token: int = 1,
    copied: Literal["a", "b", ""] = "",
) -> torch.Tensor:
    """a^T b over each group's rows, [G, M, N]; zeros for a group without rows. Row r of `copied` is
    its row `copies[r] // per_token`."""
    a_TM, b_TN = a_TM.contiguous(), b_TN.contiguous()
    M, N, G = a_TM.shape[1], b_TN.shape[1], ends_G.shape[0]
    y_GMN = a_TM.new_empty(G, M, N)
    if not num_rows or not y_GMN.numel():
        return y_GMN.zero_()
    copy = {
        name: "copies" if name == copied else "descriptors" if _take_descriptors(x) else "pointers"
        for name, x in (("a", a_TM), ("b", b_TN))
    }

    def launch(tile: tiles.Tiles) -> None:
        a = b = None
        if copy["a"] == "descriptors":
            a = TensorDescriptor.from_tensor(a_TM, [tile.depth, tile.rows])
        if copy["b"] == "descriptors":
            b = TensorDescriptor.from_tensor(b_TN, [tile.depth, tile.columns])
        _of_groups[(G * cdiv(M, tile.rows) * cdiv(N, tile.columns),)](
            *(a, b, a_TM, b_TN, copies, y_GMN, ends_G, num_rows, M, N, per_token),
            A_COPY=copy["a"],
            B_COPY=copy["b"],
            UPCAST=INTERPRETED,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            BAND=tiles.BAND,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    several = tiles.candidates(tiles.of_groups(a_TM), a_TM)
    sizes = (num_rows, G, M, N)
    launch(select_config(_of_groups, a_TM, sizes, several, launch, " ".join(copy.values())))
    return y_GMN


def by_rows(x_TK: torch.Tensor, weight_GNK: torch.Tensor, counts_G: torch.Tensor) -> torch.Tensor:
    """Each group's rows times its own matrix, [T, N]; zeros for rows past the groups."""
    bounds = plan(counts_G, x_TK.shape[0], x_TK, past=True)
    return multiply_rows(x_TK, weight_GNK, bounds)[0]


def of_groups(a_TM: torch.Tensor, b_TN: torch.Tensor, counts_G: torch.Tensor) -> torch.Tensor:
    """a^T b over each group's rows, [G, M, N]; zeros for a group without rows."""
    ends_G = counts_G.cumsum(0, dtype=torch.int32)
    return multiply_groups(a_TM, b_TN, ends_G, num_rows=a_TM.shape[0])


PRODUCTS = operators("triton", by_rows, of_groups)
group_gemm = PRODUCTS.by_rows
