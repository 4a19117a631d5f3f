"""Definition of causal_conv1d. The reference of every other implementation.

T tokens, B documents, C channels, W taps of a kernel.
"""

from typing import Literal

import torch
import torch.nn.functional as F

from penstock_kernels.attention.segments import VarlenMetadata

Activation = Literal["silu"]


def causal_conv1d(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    segments: VarlenMetadata,
    activation: Activation | None = None,
    initial_state_BWC: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A depthwise convolution of each document over its tokens: the last tap is a token's own.

    Args:
        initial_state_BWC: the W - 1 inputs before each document's first, [B, W - 1, C]; None for
            zeros.

    Returns:
        Outputs [T, C] in x's dtype, computed in fp32 or wider and rounded once; and each document's
        last W - 1 inputs, [B, W - 1, C], of which those before its first are the initial state's.
    """
    wide = torch.promote_types(x_TC.dtype, torch.float32)
    before = weight_CW.shape[1] - 1
    outputs, states, start = [], [], 0
    for document, length in enumerate(segments.lengths):
        if initial_state_BWC is None:
            state_WC = x_TC.new_zeros(before, x_TC.shape[1])
        else:
            state_WC = initial_state_BWC[document].to(x_TC.dtype)
        inputs_LC = torch.cat((state_WC, x_TC[start : start + length]))
        bias = None if bias_C is None else bias_C.to(wide)
        y_1CL = F.conv1d(
            inputs_LC.to(wide).t().unsqueeze(0),
            weight_CW.to(wide).unsqueeze(1),
            bias,
            groups=x_TC.shape[1],
        )
        y_LC = y_1CL.squeeze(0).t()
        outputs.append(F.silu(y_LC) if activation == "silu" else y_LC)
        states.append(inputs_LC[len(inputs_LC) - before :])
        start += length
    return torch.cat(outputs).to(x_TC.dtype), torch.stack(states)


def decode_step(
    x_BC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    state_BWC: torch.Tensor,
    activation: Activation | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each of several documents, and their next states, [B, W - 1, C]."""
    wide = torch.promote_types(x_BC.dtype, torch.float32)
    inputs_BWC = torch.cat((state_BWC.to(x_BC.dtype), x_BC.unsqueeze(1)), dim=1)
    y_BC = (inputs_BWC.to(wide) * weight_CW.to(wide).t()).sum(1)
    if bias_C is not None:
        y_BC = y_BC + bias_C.to(wide)
    y_BC = F.silu(y_BC) if activation == "silu" else y_BC
    return y_BC.to(x_BC.dtype), inputs_BWC[:, 1:]
