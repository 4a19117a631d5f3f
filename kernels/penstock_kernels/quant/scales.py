"""Numbers that scales are made with, and how far they reach beyond a group."""

import torch

from penstock_kernels.quant.formats import Format

SMALLEST = 1e-12
"""No scale is made of less: zeros are divided by this."""

E4M3_MOST = 448.0
E2M1_MOST = 6.0
INT8_MOST = 127.0
INT4_MOST = 7.0
"""Symmetric: -8 is never used."""


def divided(numbers: torch.Tensor, by: float) -> torch.Tensor:
    """The nearest float32 to each quotient, on every device.

    PyTorch multiplies by a reciprocal where one operand of a division is a plain number: of
    numbers over tensors everywhere, of tensors over numbers on GPUs.
    """
    return numbers / numbers.new_full((), by)


def largest(weight_NK: torch.Tensor, format: Format) -> torch.Tensor | None:
    """The largest magnitudes that `quantise` takes, of [..., N, K]; None if it needs none.

    Of a matrix [..., 1, 1] for `nvfp4`, of a row [..., N, 1] for `int8` and
    `fp8`. Whoever holds a part of
    what they are the largest of takes the maximum over all parts' before quantising its own; then
    the parts' codes are those of the whole.
    """
    if format.scales == "e4m3":
        return _largest(weight_NK, (-2, -1))
    if format.group is None:
        return _largest(weight_NK, (-1,))
    return None


def _largest(weight: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    return torch.linalg.vector_norm(weight, float("inf"), dim=dims, keepdim=True).float()
