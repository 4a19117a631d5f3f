"""Read MXFP4 experts, as gpt-oss is published, as bfloat16.

`experts.gate_up_proj` is stored as two uint8 tensors: `gate_up_proj_blocks` [E, N, G, 16], two
codes per byte with the earlier one in the low bits, and `gate_up_proj_scales` [E, N, G], exponents
of two with a bias of 127. E experts, N output features, G groups of 32 of the K input features.
Under its own name it is [E, K, N], as an unquantized checkpoint has it.
"""

from collections.abc import Iterable, Sequence

import torch

from penstock.engine.hf.safetensors_reader import SafetensorsFolder, Stored
from penstock.models.quantization_config import malformed
from penstock_kernels.quant.levels import E2M1

BLOCKS, SCALES = "_blocks", "_scales"
GROUP = 32
BIAS = 127
"""Of the exponents."""


class Mxfp4Tensors:
    """The tensors of a folder, with MXFP4 ones dequantized to bfloat16, which is exact."""

    def __init__(self, folder: SafetensorsFolder) -> None:
        self._folder = folder

    def stored(self, name: str) -> Stored:
        """Shape and dtype. Raises CapabilityError if blocks and scales do not fit together."""
        if not self._is_quantized(name):
            return self._folder.stored(name)
        experts, outputs, groups = self._shape(name)
        return Stored((experts, groups * GROUP, outputs), torch.bfloat16, 0)

    def box(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """A box of a tensor, on the CPU; reads only its groups."""
        if not self._is_quantized(name):
            return self._folder.box(name, offsets, sizes)
        self._shape(name)
        (expert, first, output), (experts, inputs, outputs) = offsets, sizes
        group, end = first // GROUP, -(-(first + inputs) // GROUP)
        at, size = (expert, output, group), (experts, outputs, end - group)
        blocks = self._folder.box(name + BLOCKS, (*at, 0), (*size, GROUP // 2))
        weight_ENK = dequantize_blocks(blocks, self._folder.box(name + SCALES, at, size))
        return weight_ENK.narrow(2, first - group * GROUP, inputs).mT.contiguous()

    def order(self, name: str) -> tuple[str, int]:
        """A sort key: the order of tensors in the files."""
        return self._folder.order(name + BLOCKS if self._is_quantized(name) else name)

    def require(self, names: Iterable[str]) -> None:
        """Raise CapabilityError unless every name, or its blocks, exists."""
        self._folder.require(name for name in names if not self._is_quantized(name))

    def _is_quantized(self, name: str) -> bool:
        return name + BLOCKS in self._folder

    def _shape(self, name: str) -> tuple[int, int, int]:
        """E, N and G."""
        scales = name + SCALES
        if scales not in self._folder:
            raise malformed(scales, "it is not there")
        blocks, exponents = self._folder.stored(name + BLOCKS), self._folder.stored(scales)
        if blocks.dtype != torch.uint8 or blocks.shape[3:] != (GROUP // 2,):
            raise malformed(
                name + BLOCKS,
                f"it is {blocks.dtype} {blocks.shape}, and would be torch.uint8 of groups of "
                f"{GROUP // 2} bytes",
            )
        if exponents.dtype != torch.uint8 or exponents.shape != blocks.shape[:3]:
            raise malformed(
                scales,
                f"it is {exponents.dtype} {exponents.shape}, and would be torch.uint8 "
                f"{blocks.shape[:3]}",
            )
        experts, outputs, groups = exponents.shape
        return experts, outputs, groups


def dequantize_blocks(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """bfloat16 [..., G * 32] of codes uint8 [..., G, 16] and exponents uint8 [..., G]."""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    levels = torch.tensor(E2M1)[codes.int()]
    return torch.ldexp(levels, scales.int().unsqueeze(-1) - BIAS).bfloat16().flatten(-2)
