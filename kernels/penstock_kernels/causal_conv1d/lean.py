"""causal_conv1d on a CPU: blocks of tokens, whose taps are multiplied and added in place.

A block is small enough for a core's caches, so memory is read and written once. Only inputs are
saved for the backward pass.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch

from penstock_kernels.causal_conv1d.autograd import differentiable

BLOCK = 2**16
"""Elements of a block."""


def _documents(cu_seqlens: torch.Tensor) -> Iterator[tuple[int, slice]]:
    bounds = cu_seqlens.tolist()
    for document, (start, end) in enumerate(pairwise(bounds)):
        yield document, slice(start, end)


class _Taps:
    def __init__(self, weight_CW: torch.Tensor, bias_C: torch.Tensor | None, x: torch.Tensor):
        self.wide = torch.promote_types(x.dtype, torch.float32)
        # By how many tokens ago they read.
        self.taps_WC = weight_CW.to(self.wide).t().flip(0).contiguous()
        self.bias = None if bias_C is None else bias_C.to(self.wide)
        self.before = len(self.taps_WC) - 1
        self.rows = max(16, BLOCK // max(1, x.shape[1]))

    def sums(self, inputs_LC: torch.Tensor) -> torch.Tensor:
        rows = len(inputs_LC) - self.before
        found_LC = inputs_LC[self.before :] * self.taps_WC[0]
        for ago in range(1, self.before + 1):
            first = self.before - ago
            found_LC.addcmul_(inputs_LC[first : first + rows], self.taps_WC[ago])
        return found_LC if self.bias is None else found_LC.add_(self.bias)

    def blocks(
        self, x_TC: torch.Tensor, tokens: slice, state_WC: torch.Tensor | None
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """A document's tokens by blocks, and their inputs with the `before` earlier ones."""
        for start in range(tokens.start, tokens.stop, self.rows):
            block = slice(start, min(start + self.rows, tokens.stop))
            first = start - self.before
            if start > tokens.start:
                yield block, x_TC[first : block.stop].to(self.wide)
                continue
            inputs_LC = x_TC.new_zeros(
                self.before + block.stop - start, x_TC.shape[1], dtype=self.wide
            )
            if state_WC is not None:
                inputs_LC[: self.before] = state_WC
            inputs_LC[self.before :] = x_TC[block]
            yield block, inputs_LC


def _forward(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    initial_BWC: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    taps = _Taps(weight_CW, bias_C, x_TC)
    y_TC = x_TC.new_empty(x_TC.shape)
    final_BWC = x_TC.new_zeros(len(cu_seqlens) - 1, taps.before, x_TC.shape[1])
    for document, tokens in _documents(cu_seqlens):
        state_WC = None if initial_BWC is None else initial_BWC[document]
        for block, inputs_LC in taps.blocks(x_TC, tokens, state_WC):
            found_LC = taps.sums(inputs_LC)
            y_TC[block] = torch.nn.functional.silu(found_LC, inplace=True) if silu else found_LC
        tail = min(taps.before, tokens.stop - tokens.start)
        if state_WC is not None and tail < taps.before:
            final_BWC[document, : taps.before - tail] = state_WC[tail:]
        final_BWC[document, taps.before - tail :] = x_TC[tokens.stop - tail : tokens.stop]
    return y_TC, final_BWC


def _backward(
    dy_TC: torch.Tensor,
    dfinal_BWC: torch.Tensor | None,
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    initial_BWC: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, weight, bias and the initial states; those of absent inputs are empty."""
    taps = _Taps(weight_CW, bias_C, x_TC)
    before, wide = taps.before, taps.wide
    dx_TC = x_TC.new_empty(x_TC.shape)
    dtaps_WC = torch.zeros_like(taps.taps_WC)
    dbias_C = x_TC.new_zeros(x_TC.shape[1], dtype=wide)
    dinitial_BWC = x_TC.new_empty(
        (0,) if initial_BWC is None else initial_BWC.shape,
        dtype=None if initial_BWC is None else initial_BWC.dtype,
    )
    for document, tokens in _documents(cu_seqlens):
        state_WC = None if initial_BWC is None else initial_BWC[document]
        # Of a block's last inputs, by the outputs after it and the final state.
        carried_WC = x_TC.new_zeros(before, x_TC.shape[1], dtype=wide)
        if dfinal_BWC is not None:
            carried_WC += dfinal_BWC[document]
        # From the last: a block's outputs read the last inputs of the one before.
        for block, inputs_LC in reversed([*taps.blocks(x_TC, tokens, state_WC)]):
            slopes_LC = dy_TC[block].to(wide)
            if silu:
                slopes_LC = torch.ops.aten.silu_backward(slopes_LC, taps.sums(inputs_LC))
            rows = len(slopes_LC)
            dinputs_LC = x_TC.new_zeros(before + rows, x_TC.shape[1], dtype=wide)
            dinputs_LC[rows:] = carried_WC
            for ago in range(before + 1):
                reached = slice(before - ago, before - ago + rows)
                dinputs_LC[reached].addcmul_(slopes_LC, taps.taps_WC[ago])
                dtaps_WC[ago] += torch.linalg.vecdot(slopes_LC, inputs_LC[reached], dim=0)
            dbias_C += slopes_LC.sum(0)
            dx_TC[block] = dinputs_LC[before:]
            # They belong to the block before, which adds its own.
            carried_WC = dinputs_LC[:before]
        if initial_BWC is not None:
            dinitial_BWC[document] = carried_WC
    dweight_CW = dtaps_WC.flip(0).t().to(weight_CW.dtype).contiguous()
    dbias_C = x_TC.new_empty(0) if bias_C is None else dbias_C.to(bias_C.dtype)
    return dx_TC, dweight_CW, dbias_C, dinitial_BWC


causal_conv1d = differentiable("causal_conv1d_lean", _forward, _backward)
"""Same as the reference, except for the last bits of sums."""
