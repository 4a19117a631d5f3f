"""One chunk of linear attention, forward and backward, for all heads at once.

H heads, C tokens; K and V the widths of a key and of a value. Within a chunk the recurrence is
solved in closed form. With q~, k~ decayed since the chunk's start, k^ until its end, and S the
state before it:

    (I + A beta) D = v - k~ S     A: products of keys with earlier ones, decayed between
    y = q~ S + P (beta D)         P: products of queries with keys, decayed between
    S' = total * S + k^T (beta D)

Without the delta rule beta D is v. (WY representation, https://arxiv.org/abs/2406.06484, applied to
the values instead of to the keys: one product with K x V states less.)

Queries and keys are stacked, as they are multiplied by the same matrices; without the delta rule
only queries are rows of such products. A state of zeros, and no gradient of one, is None.
"""

from dataclasses import dataclass

import torch

from penstock_kernels.linear_attention.decays import Decays


@dataclass(frozen=True, eq=False)
class Chunk:
    """Inputs of a chunk. Tokens that only fill it up are zeros."""

    qk: torch.Tensor
    """Queries, scaled, and keys: [H, 2, C, K]."""
    v: torch.Tensor
    decays: Decays
    beta: torch.Tensor | None

    @property
    def rows(self) -> torch.Tensor:
        """What reads the state: queries, and with the delta rule keys: [H, R, C, K]."""
        return self.qk if self.beta is not None else self.qk[:, :1]

    @property
    def k(self) -> torch.Tensor:
        """[H, C, K]."""
        return self.qk[:, 1]


@dataclass(frozen=True, eq=False)
class ChunkGradients:
    """Of a chunk's inputs; of q as it is scaled."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor | None
    state: torch.Tensor | None
    """None if it was not asked for."""


def forward(
    chunk: Chunk, state_HKV: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """y [H, C, V], and D of the delta rule."""
    decays, rows_HRCK, beta_HC1 = chunk.decays, chunk.rows, chunk.beta
    products_HRCC = decays.products(rows_HRCK, chunk.k)
    read_HRCV = None
    if state_HKV is not None:
        since_start = (rows_HRCK * decays.since_start.unsqueeze(1)).flatten(1, 2)
        read_HRCV = torch.bmm(since_start, state_HKV).unflatten(1, rows_HRCK.shape[1:3])
    deltas_HCV, updates_HCV = None, chunk.v
    if beta_HC1 is not None:
        v_HCV = chunk.v if read_HRCV is None else chunk.v - read_HRCV[:, 1]
        solution_HCC = _solution(products_HRCC[:, 1], beta_HC1)
        deltas_HCV = torch.baddbmm(v_HCV, solution_HCC, v_HCV * beta_HC1, alpha=-1)
        updates_HCV = deltas_HCV * beta_HC1
    if read_HRCV is None:
        return torch.bmm(products_HRCC[:, 0], updates_HCV), deltas_HCV
    return torch.baddbmm(read_HRCV[:, 0], products_HRCC[:, 0], updates_HCV), deltas_HCV


def next_state(
    chunk: Chunk, deltas_HCV: torch.Tensor | None, state_HKV: torch.Tensor | None
) -> torch.Tensor:
    """The state after the chunk."""
    keys_HKC = (chunk.k * chunk.decays.until_end).mT
    updates_HCV = _updates(chunk, deltas_HCV)
    if state_HKV is None:
        return torch.bmm(keys_HKC, updates_HCV)
    return (state_HKV * chunk.decays.total).baddbmm_(keys_HKC, updates_HCV)


def backward(
    chunk: Chunk,
    deltas_HCV: torch.Tensor | None,
    state_HKV: torch.Tensor | None,
    dy_HCV: torch.Tensor,
    dnext_HKV: torch.Tensor | None,
    wants_state: bool,
) -> ChunkGradients:
    """From the gradients of the outputs and of the state after the chunk.

    A decay acts where a query or a key does, so its gradient is theirs: with dk_row of k~ and of
    rows of A, and dk_column of columns and of k^,  dG = q * dq + k * dk_row - k * dk_column.
    """
    decays, rows_HRCK, k_HCK = chunk.decays, chunk.rows, chunk.k
    beta_HC1 = chunk.beta
    products_HRCC = decays.products(rows_HRCK, k_HCK)
    updates_HCV = _updates(chunk, deltas_HCV)

    # Of what is added to the state.
    dv_HCV = torch.bmm(products_HRCC[:, 0].mT, dy_HCV)
    dk_HCK, dtotal_HK = torch.zeros_like(k_HCK), None
    if dnext_HKV is not None:
        end = decays.until_end
        dv_HCV.baddbmm_(k_HCK * end, dnext_HKV)
        dk_HCK = torch.bmm(updates_HCV, dnext_HKV.mT).mul_(end)
        dtotal_HK = (k_HCK * dk_HCK).sum(1)

    # Of what is read, and of products.
    dread_HRCV, dbeta_HC = dy_HCV.unsqueeze(1), None
    if beta_HC1 is not None and deltas_HCV is not None:
        solution_HCC = _solution(products_HRCC[:, 1], beta_HC1)
        dv_HCV = torch.baddbmm(dv_HCV, solution_HCC.mT, dv_HCV * beta_HC1, alpha=-1)
        dbeta_HC = (dv_HCV * deltas_HCV).sum(-1)
        dv_HCV *= beta_HC1
        dread_HRCV = torch.stack((dy_HCV, -dv_HCV), dim=1)
    dread = dread_HRCV.flatten(1, 2)
    dproducts_HRCC = torch.bmm(dread, updates_HCV.mT).unflatten(1, dread_HRCV.shape[1:3])
    if beta_HC1 is not None:
        # `_solution` reads A below its diagonal alone.
        dproducts_HRCC[:, 1].tril_(-1)
    drows_HRCK = torch.zeros_like(rows_HRCK)
    dstate_HKV = None if dnext_HKV is None else dnext_HKV * decays.total
    if state_HKV is not None:
        start = decays.since_start.unsqueeze(1)
        drows_HRCK = torch.bmm(dread, state_HKV.mT).view(rows_HRCK.shape).mul_(start)
        if dstate_HKV is not None and dtotal_HK is not None:
            dtotal_HK += (state_HKV * dstate_HKV).sum(-1)
    if wants_state:
        since_start = (rows_HRCK * decays.since_start.unsqueeze(1)).flatten(1, 2)
        if dstate_HKV is None:
            dstate_HKV = torch.bmm(since_start.mT, dread)
        else:
            dstate_HKV.baddbmm_(since_start.mT, dread)
    decays.add_gradients_(dproducts_HRCC, rows_HRCK, k_HCK, drows_HRCK, dk_HCK)

    dsums_HCK = (rows_HRCK * drows_HRCK).sum(1)
    dsums_HCK.addcmul_(k_HCK, dk_HCK, value=-1)
    if dtotal_HK is not None:
        # What decays until the chunk's end depends on the last sum.
        dsums_HCK[:, -1] += dtotal_HK
    if beta_HC1 is not None:
        dk_HCK += drows_HRCK[:, 1]
    dlog_decay = decays.gradient(dsums_HCK)
    return ChunkGradients(drows_HRCK[:, 0], dk_HCK, dv_HCV, dlog_decay, dbeta_HC, dstate_HKV)


def _updates(chunk: Chunk, deltas_HCV: torch.Tensor | None) -> torch.Tensor:
    """What keys add to the state: beta D, or v."""
    if deltas_HCV is None or chunk.beta is None:
        return chunk.v
    return deltas_HCV * chunk.beta


def _solution(products_HCC: torch.Tensor, beta_HC1: torch.Tensor) -> torch.Tensor:
    # X of (I + A beta) X = A: then D = r - X (beta r) solves (I + A beta) D = r, and the transposed
    # X solves the transposed system of the gradients.
    # A beta as it is: the solver takes its diagonal as ones, and reads nothing above it.
    return torch.linalg.solve_triangular(
        products_HCC * beta_HC1.mT, products_HCC.tril(-1), upper=False, unitriangular=True
    )
