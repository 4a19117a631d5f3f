"""Definition of the gated linear units.

T tokens, F features. The order of roundings is that of Hugging Face's MLPs, so that the two are
bitwise identical (Shazeer 2020, "GLU Variants Improve Transformer").
"""

import torch
import torch.nn.functional as F


def swiglu(gate_TF: torch.Tensor, up_TF: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up in the inputs' dtype."""
    return F.silu(gate_TF) * up_TF


def packed_swiglu(both_TF: torch.Tensor) -> torch.Tensor:
    """swiglu of the two halves of `both_TF`, [T, 2 F]: gates, then ups."""
    return swiglu(*both_TF.chunk(2, dim=-1))


def geglu(gate_TF: torch.Tensor, up_TF: torch.Tensor) -> torch.Tensor:
    """Return gelu(gate) * up in the inputs' dtype: the gate times the normal distribution's share
    below it."""
    return F.gelu(gate_TF) * up_TF


def geglu_tanh(gate_TF: torch.Tensor, up_TF: torch.Tensor) -> torch.Tensor:
    """Return gelu(gate) * up in the inputs' dtype, with the share below the gate as
    (1 + tanh(sqrt(2 / pi) * (gate + 0.044715 gate^3))) / 2 (Hendrycks and Gimpel 2016)."""
    return F.gelu(gate_TF, approximate="tanh") * up_TF
