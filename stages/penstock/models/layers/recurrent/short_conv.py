"""Gated short convolutions over packed documents.

T tokens, B documents, D model width, C channels and W taps.
"""

import torch
import torch.nn.functional as F
from torch import nn

from penstock.models.decoder_config import DecoderConfig
from penstock.models.layers.attention import DecodeSegments, PrefillSegments
from penstock.models.layers.call_hook import HeadBlocks, OfHeads, of_all_heads
from penstock.models.layers.recurrent.mixer import RecurrentMixer, ShortConvolution
from penstock.models.short_conv_config import ShortConvConfig
from penstock_kernels.attention import VarlenMetadata
from penstock_kernels.causal_conv1d import causal_conv1d, decode_step


class ShortConv(RecurrentMixer):
    """`out_proj(c * conv(b * x))`, where in_proj gives b, c and x, as in LFM2.

    Passes with a KV cache keep the last W - 1 inputs of the convolution.

    `run_core` is a call hook around the convolution; a head is a channel.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        sizes, width = config.linear, config.hidden_size
        assert isinstance(sizes, ShortConvConfig)
        self.conv = ShortConvolution(sizes.channels, sizes.kernel, bias=sizes.bias)
        self.in_proj = nn.Linear(width, 3 * sizes.channels, bias=sizes.bias)
        self.out_proj = nn.Linear(sizes.channels, width, bias=sizes.bias)

    def mix(self, x_TD: torch.Tensor, segments: VarlenMetadata) -> torch.Tensor:
        b_TC, c_TC, x_TC = self.in_proj(x_TD).chunk(3, dim=-1)
        y_TC = self.run_core(self._core, b_TC * x_TC, segments)
        return self.out_proj(c_TC * y_TC)

    def head_blocks(self) -> tuple[HeadBlocks]:
        # Of the input of the convolution.
        return (((len(self.conv.weight), 1),),)

    def _core(
        self,
        x_TC: torch.Tensor,
        segments: VarlenMetadata,
        of_heads: OfHeads = of_all_heads,
    ) -> torch.Tensor:
        [blocks] = self.head_blocks()
        weight_CW, bias_C = of_heads(self.conv.taps_CW(), blocks), self.conv.bias
        if bias_C is not None:
            bias_C = of_heads(bias_C, blocks)
        if isinstance(segments, DecodeSegments):
            # One more token of each cached sequence, then padding, whose outputs are zeros.
            [tail_BWC] = segments.states()
            rows = len(tail_BWC)
            y_BC, tail_BWC = decode_step(x_TC[:rows], weight_CW, bias_C, tail_BWC)
            segments.replace_states(tail_BWC)
            return F.pad(y_BC, (0, 0, 0, len(x_TC) - rows))
        if isinstance(segments, PrefillSegments):
            y_TC, tail_BWC = causal_conv1d(x_TC, weight_CW, bias_C, segments.uncached())
            segments.store_states(tail_BWC)
            return y_TC
        return causal_conv1d(x_TC, weight_CW, bias_C, segments)[0]
