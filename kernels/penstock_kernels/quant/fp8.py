"""fp8: each row has a float32 scale, numbers are e4m3."""

import torch

from penstock_kernels.quant.scales import E4M3_MOST, SMALLEST, divided


def quantise(weight_NK: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of [..., N, K], given the rows' largest magnitudes [..., N, 1]."""
    scales = scales_of(largest).contiguous()
    return codes_of(weight_NK.float() / scales), scales


def scales_of(largest: torch.Tensor) -> torch.Tensor:
    """What brings the largest magnitudes to the largest number of e4m3."""
    return divided(largest, E4M3_MOST).clamp(min=SMALLEST)


def codes_of(scaled: torch.Tensor) -> torch.Tensor:
    """The nearest e4m3 to each number, ties to even, as bytes."""
    return scaled.clamp(-E4M3_MOST, E4M3_MOST).to(torch.float8_e4m3fn).view(torch.uint8)
