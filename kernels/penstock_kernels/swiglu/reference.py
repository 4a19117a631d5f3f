"""What swiglu means. Obvious, and the judge of every other implementation."""

import torch
import torch.nn.functional as F


def swiglu(gate_TF: torch.Tensor, up_TF: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` in the inputs' dtype. T tokens, F features.

    The order of roundings is that of Hugging Face's LlamaMLP, so that the two agree to the bit.
    """
    return F.silu(gate_TF) * up_TF
