"""What token mixers with a state share.

T tokens, D model width, C channels of a convolution and W its taps.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import nn

from penstock.models.layers.call_hook import HeadBlocks, call
from penstock_kernels.attention import VarlenMetadata


class RecurrentMixer(nn.Module, ABC):
    """A token mixer with a state, whose heads do not see one another.

    `run_core(core, *inputs, segments)` calls `core(*inputs, segments, of_heads)`, which returns [T,
    heads, width], or [T, heads]. It may do so with other tokens, of some of the heads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.run_core: Callable[..., torch.Tensor] = call

    def forward(
        self,
        x_TD: torch.Tensor,
        cos_TH: torch.Tensor,
        sin_TH: torch.Tensor,
        segments: VarlenMetadata,
        query_scale_T: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The output, which is added to the residual stream, [T, D]. There is no RoPE."""
        del cos_TH, sin_TH, query_scale_T
        assert segments.start_rows is None, "a state has all of a document's past"
        return self.mix(x_TD, segments)

    @abstractmethod
    def mix(self, x_TD: torch.Tensor, segments: VarlenMetadata) -> torch.Tensor:
        """The output, [T, D]."""

    @abstractmethod
    def head_blocks(self) -> Sequence[HeadBlocks]:
        """The blocks of heads in the last dimension of each input, as many as are on this rank.
        Where a block has fewer heads than another, each is for as many consecutive ones of it."""


class ShortConvolution(nn.Module):
    """The parameters of a depthwise convolution, in the shapes of `nn.Conv1d`'s."""

    def __init__(self, channels: int, taps: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def taps_CW(self) -> torch.Tensor:  # noqa: N802 - C and W name the dimensions
        return self.weight.squeeze(1)
