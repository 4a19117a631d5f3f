"""fp8: each row has a float32 scale, values are e4m3."""

import torch

from penstock_kernels.quant.scales import E4M3_MOST, SMALLEST, divide_float32


def quantize(weight_NK: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of [..., N, K], given the rows' largest magnitudes [..., N, 1]."""
    scales = compute_scales(largest).contiguous()
    return cast_to_fp8(weight_NK.float() / scales), scales


def compute_scales(largest: torch.Tensor) -> torch.Tensor:
    """Scales that map the maxima to the largest value of e4m3."""
    return divide_float32(largest, E4M3_MOST).clamp(min=SMALLEST)


def cast_to_fp8(scaled: torch.Tensor) -> torch.Tensor:
    """The nearest e4m3 to each number, ties to even, as bytes."""
    return scaled.clamp(-E4M3_MOST, E4M3_MOST).to(torch.float8_e4m3fn).view(torch.uint8)
