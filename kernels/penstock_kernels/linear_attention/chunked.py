"""Linear attention by chunks, in PyTorch: the implementation for CPUs, in fp32 and fp64.

Its inputs and the delta rule's deltas are saved for the backward pass, which passes each document's
chunks again for the states before them.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from penstock_kernels.custom_op import empty_like
from penstock_kernels.launch_sizes import next_power_of_2
from penstock_kernels.linear_attention.autograd import differentiable
from penstock_kernels.linear_attention.chunk import Chunk, backward, forward, next_state
from penstock_kernels.linear_attention.decays import chunk_decays

# Tokens of a chunk. With half as many as on a GPU, products within chunks cost half as much.
CHUNK = 32

# Chunks whose inputs and states the backward pass has in memory at a time: those of a longer
# document are passed once more.
KEPT = 64


class _Packed:
    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor | None,
        cu_seqlens: torch.Tensor,
        scale: float,
    ) -> None:
        self.q, self.k, self.v, self.log_decay, self.beta = q, k, v, log_decay, beta
        self.bounds, self.scale, self.num_heads = cu_seqlens.tolist(), scale, v.shape[1]
        self.wide = torch.promote_types(v.dtype, torch.float32)
        self.state_shape = len(self.bounds) - 1, self.num_heads, k.shape[2], v.shape[2]

    def documents(self) -> Iterator[tuple[int, list[slice]]]:
        """Numbers, and chunks."""
        for document, (start, end) in enumerate(pairwise(self.bounds)):
            starts = range(start, end, CHUNK)
            yield document, [slice(first, min(first + CHUNK, end)) for first in starts]

    def read(self, x: torch.Tensor, tokens: slice) -> torch.Tensor:
        """A chunk of a tensor [T, heads, ...] as [N, C, ...]; a key head is repeated for its value
        heads."""
        chunk = x[tokens].transpose(0, 1).to(self.wide)
        if x.shape[1] < self.num_heads:
            chunk = chunk.repeat_interleave(self.num_heads // x.shape[1], dim=0)
        length = tokens.stop - tokens.start
        # Decays by channel halve chunks, so zeros fill them up to a power of 2.
        if self.log_decay.ndim == 3 and (missing := next_power_of_2(length) - length):
            chunk = F.pad(chunk, (*[0, 0] * (chunk.ndim - 2), 0, missing))
        return chunk

    def write(self, x: torch.Tensor, tokens: slice, chunk: torch.Tensor | None) -> None:
        """[N, C, ...] into x, [T, heads, ...], summed over the value heads of a key head."""
        if chunk is None:
            return
        if x.shape[1] < self.num_heads:
            chunk = chunk.unflatten(0, (x.shape[1], -1)).sum(1)
        x[tokens] = chunk[:, : tokens.stop - tokens.start].transpose(0, 1)

    def chunk(self, tokens: slice) -> Chunk:
        qk = torch.stack((self.read(self.q, tokens), self.read(self.k, tokens)), dim=1)
        qk[:, 0].mul_(self.scale)
        decays = chunk_decays(self.read(self.log_decay, tokens))
        beta = None if self.beta is None else self.read(self.beta, tokens).unsqueeze(-1)
        return Chunk(qk, self.read(self.v, tokens), decays, beta)


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
    packed = _Packed(q_TGK, k_TGK, v_TNV, log_decay_TN, beta_TN, cu_seqlens, scale)
    y_TNV = v_TNV.new_empty(v_TNV.shape)
    deltas_TNV = v_TNV.new_empty((0,) if beta_TN is None else v_TNV.shape, dtype=packed.wide)
    final_BNKV = v_TNV.new_empty(packed.state_shape, dtype=packed.wide)
    # Autocast would multiply in 16 bits what is computed in fp32 here.
    with torch.autocast("cpu", enabled=False):
        for document, chunks in packed.documents():
            state = _state(initial_state_BNKV, document, packed.wide)
            for tokens in chunks:
                chunk = packed.chunk(tokens)
                y_NCV, deltas_NCV = forward(chunk, state)
                packed.write(y_TNV, tokens, y_NCV)
                packed.write(deltas_TNV, tokens, deltas_NCV)
                state = next_state(chunk, deltas_NCV, state)
            assert state is not None, "documents have tokens"
            final_BNKV[document] = state
    return y_TNV, final_BNKV, deltas_TNV


def _state(
    states_BNKV: torch.Tensor | None, document: int, wide: torch.dtype
) -> torch.Tensor | None:
    return None if states_BNKV is None else states_BNKV[document].to(wide)


def _forward_fake(
    _: torch.Tensor,
    k_TGK: torch.Tensor,
    v_TNV: torch.Tensor,
    log_decay_TN: torch.Tensor,
    beta_TN: torch.Tensor | None,
    *further: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    del log_decay_TN
    _, cu_seqlens, _ = further
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
    inputs = q_TGK, k_TGK, v_TNV, log_decay_TN, beta_TN
    packed = _Packed(*inputs, cu_seqlens, scale)
    *by_token, dinitial_BNKV = empty_like(*inputs, initial_state_BNKV)
    # Autocast would multiply in 16 bits what is cast to fp32 or wider here.
    with torch.autocast("cpu", enabled=False):
        for document, chunks in packed.documents():
            state = _state(initial_state_BNKV, document, packed.wide)
            # States of all chunks would take K V numbers for each: those before parts are kept, and
            # the others computed again.
            parts = [chunks[first : first + KEPT] for first in range(0, len(chunks), KEPT)]
            befores = [state]
            for part in parts[:-1]:
                befores.append(_passed(packed, part, deltas_TNV, befores[-1])[1])
            dstate = _state(dfinal_BNKV, document, packed.wide)
            for part in reversed(parts):
                passed, _ = _passed(packed, part, deltas_TNV, befores.pop(), keep=True)
                for tokens in reversed(part):
                    dy_NCV = packed.read(dy_TNV, tokens).contiguous()
                    wants_state = tokens is not chunks[0] or initial_state_BNKV is not None
                    slopes = backward(*passed.pop(), dy_NCV, dstate, wants_state)
                    slopes.q.mul_(scale)
                    chunk_gradients = slopes.q, slopes.k, slopes.v, slopes.log_decay, slopes.beta
                    for gradient, chunk_gradient in zip(by_token, chunk_gradients, strict=True):
                        packed.write(gradient, tokens, chunk_gradient)
                    dstate = slopes.state
            if initial_state_BNKV is not None and dstate is not None:
                dinitial_BNKV[document] = dstate
    dq, dk, dv, dlog_decay, dbeta = by_token
    return dq, dk, dv, dlog_decay, dbeta, dinitial_BNKV


def _passed(
    packed: _Packed,
    part: Sequence[slice],
    deltas_TNV: torch.Tensor,
    state: torch.Tensor | None,
    *,
    keep: bool = False,
) -> tuple[list[tuple[Chunk, torch.Tensor | None, torch.Tensor | None]], torch.Tensor | None]:
    """With `keep` chunks, their deltas and the states before them; else the state after them."""
    passed = []
    for tokens in part:
        chunk = packed.chunk(tokens)
        deltas_NCV = None if packed.beta is None else packed.read(deltas_TNV, tokens)
        if keep:
            passed.append((chunk, deltas_NCV, state))
        if not keep or tokens is not part[-1]:
            state = next_state(chunk, deltas_NCV, state)
    return passed, state


chunked = differentiable(
    "linear_attention_chunked", _forward, _forward_fake, _backward, num_saved=1
)
"""Same as the reference. Computed in fp32, or fp64 for inputs of that dtype."""
