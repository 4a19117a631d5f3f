"""Linear attention by chunks, in PyTorch: the implementation for CPUs, in fp32 and fp64.

Its inputs and the delta rule's deltas are saved for the backward pass. It first passes all chunks
again, for the states before them.
"""

from collections.abc import Callable
from typing import Any

import torch

from penstock_kernels.attention.segments import VarlenMetadata
from penstock_kernels.custom_op import operator
from penstock_kernels.linear_attention.chunk import Chunk, backward, forward, next_state
from penstock_kernels.linear_attention.decays import decays_of
from penstock_kernels.linear_attention.layout import CHUNK, Batch, batches_of

MOST_CHUNKS = 16
"""Chunks, each of a document and a head, that are computed at once, unless a token has more heads:
theirs are a few megabytes."""


class _Packed:
    """The inputs of all chunks, and their states."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor | None,
        initial: torch.Tensor | None,
        cu_seqlens: torch.Tensor,
        scale: float,
    ) -> None:
        self.q, self.k, self.v, self.log_decay, self.beta = q, k, v, log_decay, beta
        self.initial, self.scale, self.num_heads = initial, scale, v.shape[1]
        self.wide = torch.promote_types(v.dtype, torch.float32)
        lengths = tuple(cu_seqlens.diff().tolist())
        self.batches = batches_of(lengths, max(1, MOST_CHUNKS // self.num_heads), CHUNK)
        self.state_shape = len(lengths), self.num_heads, k.shape[2], v.shape[2]

    def read(self, batch: Batch, *sides: torch.Tensor) -> torch.Tensor:
        """Tensors [T, heads, ...] by chunks, [H, sides, C, ...]; zeros where a chunk is filled up.

        A key head is repeated for its value heads.
        """
        is_full = all(some.stop - some.start == CHUNK for some in batch.tokens)
        make = torch.empty if is_full else torch.zeros
        heads, of_each = sides[0].shape[1], self.num_heads // sides[0].shape[1]
        shape = len(batch.tokens), heads, of_each, len(sides), CHUNK, *sides[0].shape[2:]
        found = make(shape, dtype=self.wide)
        for at, some in enumerate(batch.tokens):
            for side, x in enumerate(sides):
                rows = x[some].transpose(0, 1).unsqueeze(1)
                found[at, :, :, side, : rows.shape[2]].copy_(rows)
        return found.flatten(0, 2)

    def write(self, batch: Batch, x: torch.Tensor, found: torch.Tensor | None) -> None:
        """[H, C, ...] into x, [T, heads, ...], summed over the value heads of a key head."""
        if found is None:
            return
        heads = x.shape[1]
        of_each = self.num_heads // heads
        found = found.unflatten(0, (-1, heads, of_each))
        found = found.sum(2) if of_each > 1 else found.squeeze(2)
        for at, some in enumerate(batch.tokens):
            x[some].copy_(found[at, :, : some.stop - some.start].transpose(0, 1))

    def chunk(self, batch: Batch) -> Chunk:
        """The inputs of a batch."""
        qk_H2CK = self.read(batch, self.q, self.k)
        qk_H2CK[:, 0].mul_(self.scale)
        v_HCV = self.read(batch, self.v).squeeze(1)
        decays = decays_of(self.read(batch, self.log_decay).squeeze(1))
        beta = None
        if self.beta is not None:
            beta = self.read(batch, self.beta).squeeze(1).unsqueeze(-1)
        return Chunk(qk_H2CK, v_HCV, decays, beta)

    def scan(
        self, deltas_of: Callable[[Batch, Chunk, torch.Tensor | None], torch.Tensor | None]
    ) -> torch.Tensor:
        """Pass each batch with the state before it, and return the states after the last."""
        if self.initial is None:
            states = torch.empty(self.state_shape, dtype=self.wide)
        else:
            states = self.initial.to(self.wide, copy=True)
        for batch in self.batches:
            chunk, before = self.chunk(batch), None
            if self.initial is not None or not batch.is_first:
                before = _of_documents(states, batch)
            after = next_state(chunk, deltas_of(batch, chunk, before), before)
            _put(states, batch, after)
        return states


def _of_documents(states: torch.Tensor, batch: Batch) -> torch.Tensor:
    """A copy, [H, K, V]."""
    return torch.cat([states[document] for document in batch.documents])


def _put(states: torch.Tensor, batch: Batch, found: torch.Tensor) -> None:
    for document, one in zip(batch.documents, found.split(states.shape[1]), strict=True):
        states[document] = one


def _forward(
    q_TGK: torch.Tensor,
    k_TGK: torch.Tensor,
    v_TNV: torch.Tensor,
    log_decay_TN: torch.Tensor,
    beta_TN: torch.Tensor | None,
    initial_state_BNKV: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs, final states, and the delta rule's deltas, [T, N, V], empty without it."""
    given = q_TGK, k_TGK, v_TNV, log_decay_TN, beta_TN, initial_state_BNKV
    packed = _Packed(*given, cu_seqlens, scale)
    y_TNV = v_TNV.new_empty(v_TNV.shape)
    deltas_TNV = v_TNV.new_empty((0,) if beta_TN is None else v_TNV.shape, dtype=packed.wide)

    def solve(batch: Batch, chunk: Chunk, before: torch.Tensor | None) -> torch.Tensor | None:
        y_HCV, deltas_HCV = forward(chunk, before)
        packed.write(batch, y_TNV, y_HCV)
        packed.write(batch, deltas_TNV, deltas_HCV)
        return deltas_HCV

    with torch.autocast("cpu", enabled=False):
        final_BNKV = packed.scan(solve)
    return y_TNV, final_BNKV, deltas_TNV


def _forward_fake(
    q_TGK: torch.Tensor,
    k_TGK: torch.Tensor,
    v_TNV: torch.Tensor,
    log_decay_TN: torch.Tensor,
    beta_TN: torch.Tensor | None,
    initial_state_BNKV: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    del q_TGK, log_decay_TN, initial_state_BNKV, scale
    wide = torch.promote_types(v_TNV.dtype, torch.float32)
    state = len(cu_seqlens) - 1, v_TNV.shape[1], k_TGK.shape[2], v_TNV.shape[2]
    deltas = v_TNV.new_empty((0,) if beta_TN is None else v_TNV.shape, dtype=wide)
    return v_TNV.new_empty(v_TNV.shape), v_TNV.new_empty(state, dtype=wide), deltas


def _backward(
    dy_TNV: torch.Tensor,
    dfinal_BNKV: torch.Tensor | None,
    deltas_TNV: torch.Tensor,
    q_TGK: torch.Tensor,
    k_TGK: torch.Tensor,
    v_TNV: torch.Tensor,
    log_decay_TN: torch.Tensor,
    beta_TN: torch.Tensor | None,
    initial_state_BNKV: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients; those of absent inputs are empty."""
    given = q_TGK, k_TGK, v_TNV, log_decay_TN, beta_TN, initial_state_BNKV
    packed = _Packed(*given, cu_seqlens, scale)
    absent = v_TNV.new_empty(0)
    dq, dk, dv, dlog_decay, dbeta = (
        absent if x is None else x.new_empty(x.shape) for x in given[:5]
    )
    passed: list[tuple[Chunk, torch.Tensor | None, torch.Tensor | None]] = []

    def keep(batch: Batch, chunk: Chunk, before: torch.Tensor | None) -> torch.Tensor | None:
        deltas = None if beta_TN is None else packed.read(batch, deltas_TNV).squeeze(1)
        passed.append((chunk, deltas, before))
        return deltas

    wants_initial = initial_state_BNKV is not None
    with torch.autocast("cpu", enabled=False):
        packed.scan(keep)
        if dfinal_BNKV is None:
            dstates = torch.zeros(packed.state_shape, dtype=packed.wide)
        else:
            dstates = dfinal_BNKV.to(packed.wide, copy=True)
        for batch in reversed(packed.batches):
            dnext = None
            if dfinal_BNKV is not None or not batch.is_last:
                dnext = _of_documents(dstates, batch)
            dy = packed.read(batch, dy_TNV).squeeze(1)
            wants_state = wants_initial or not batch.is_first
            slopes = backward(*passed.pop(), dy, dnext, wants_state)
            packed.write(batch, dq, slopes.q.mul_(scale))
            packed.write(batch, dk, slopes.k)
            packed.write(batch, dv, slopes.v)
            packed.write(batch, dlog_decay, slopes.log_decay)
            packed.write(batch, dbeta, slopes.beta)
            if wants_state and slopes.state is not None:
                _put(dstates, batch, slopes.state)
    dinitial = dstates.to(initial_state_BNKV.dtype) if initial_state_BNKV is not None else absent
    return dq, dk, dv, dlog_decay, dbeta, dinitial


def _backward_fake(
    dy_TNV: torch.Tensor,
    dfinal_BNKV: torch.Tensor | None,
    deltas_TNV: torch.Tensor,
    q_TGK: torch.Tensor,
    k_TGK: torch.Tensor,
    v_TNV: torch.Tensor,
    log_decay_TN: torch.Tensor,
    beta_TN: torch.Tensor | None,
    initial_state_BNKV: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    del dy_TNV, dfinal_BNKV, deltas_TNV, cu_seqlens, scale
    given = (q_TGK, k_TGK, v_TNV, log_decay_TN, beta_TN, initial_state_BNKV)
    q, k, v, log_decay, beta, initial = (
        v_TNV.new_empty(0) if x is None else x.new_empty(x.shape) for x in given
    )
    return q, k, v, log_decay, beta, initial


_gradients_of = operator("linear_attention_chunked_gradients", _backward, fake=_backward_fake)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    # Mostly nobody has a gradient of the final states.
    ctx.set_materialize_grads(False)
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(output[2], *tensors)


def _back(
    ctx: Any, dy_TNV: torch.Tensor | None, dfinal_BNKV: torch.Tensor | None, ddeltas: None
) -> tuple[torch.Tensor | None, ...]:
    del ddeltas
    saved = ctx.saved_tensors
    if dy_TNV is None:
        dy_TNV = torch.zeros_like(saved[3])
    found = _gradients_of(dy_TNV, dfinal_BNKV, *saved, ctx.scale)
    wanted = ctx.needs_input_grad
    return *(x if wants else None for x, wants in zip(found, wanted, strict=False)), None, None


_chunked_of = operator(
    "linear_attention_chunked", _forward, fake=_forward_fake, keep=_keep, backward=_back
)


def chunked(
    q_TGK: torch.Tensor,
    k_TGK: torch.Tensor,
    v_TNV: torch.Tensor,
    log_decay_TN: torch.Tensor,
    beta_TN: torch.Tensor | None,
    segments: VarlenMetadata,
    scale: float,
    initial_state_BNKV: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same as the reference. Computed in fp32, or fp64 for inputs of that dtype."""
    given = q_TGK, k_TGK, v_TNV, log_decay_TN, beta_TN, initial_state_BNKV
    y_TNV, final_BNKV, _ = _chunked_of(*given, segments.cu_seqlens, scale)
    return y_TNV, final_BNKV
