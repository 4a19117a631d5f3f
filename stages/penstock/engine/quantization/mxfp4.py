"""Read MXFP4 experts, as gpt-oss is published: as bfloat16, or their codes.

`experts.gate_up_proj` is stored as two uint8 tensors: `gate_up_proj_blocks` [E, N, G, 16], two
codes per byte with the earlier one in the low bits, and `gate_up_proj_scales` [E, N, G], exponents
of two with a bias of 127. E experts, N output features, G groups of 32 of the K input features.
Under its own name it is [E, K, N], as an unquantized checkpoint has it.
"""

from collections.abc import Iterable, Sequence

import torch

from penstock.engine.hf.safetensors_reader import SafetensorsFolder, Stored
from penstock.models.quantization_config import malformed
from penstock_kernels.quant import QuantizedTensor, cat, dequantize
from penstock_kernels.quant.published_layouts import mxfp4_of_blocks

BLOCKS, SCALES = "_blocks", "_scales"
GROUP = 32


class Mxfp4Tensors:
    """The tensors of a folder, with MXFP4 ones dequantized to bfloat16, which is exact."""

    def __init__(self, folder: SafetensorsFolder) -> None:
        self.folder = folder

    def stored(self, name: str) -> Stored:
        """Shape and dtype. Raises CapabilityError if blocks and scales do not fit together."""
        if not self._is_quantized(name):
            return self.folder.stored(name)
        experts, outputs, groups = _shape(self.folder, name)
        return Stored((experts, groups * GROUP, outputs), torch.bfloat16, 0)

    def box(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """A box of a tensor, on the CPU; reads only its groups."""
        if not self._is_quantized(name):
            return self.folder.box(name, offsets, sizes)
        # For its checks.
        _shape(self.folder, name)
        (expert, first, output), (experts, inputs, outputs) = offsets, sizes
        group, end = first // GROUP, -(-(first + inputs) // GROUP)
        begin, size = (expert, output, group), (experts, outputs, end - group)
        weight_ENK = dequantize(_read(self.folder, name, begin, size), torch.bfloat16)
        return weight_ENK.narrow(2, first - group * GROUP, inputs).mT.contiguous()

    def order(self, name: str) -> tuple[str, int]:
        return self.folder.order(name + BLOCKS if self._is_quantized(name) else name)

    def require(self, names: Iterable[str]) -> None:
        self.folder.require(name for name in names if not self._is_quantized(name))

    def _is_quantized(self, name: str) -> bool:
        return name + BLOCKS in self.folder


class Mxfp4:
    """Reads the codes of stacks as they are. A stack is one matrix [E N, K]: the rows of each
    expert, one expert after another."""

    def is_quantized(self, folder: SafetensorsFolder, name: str) -> bool:
        return name + BLOCKS in folder

    def codes_tensor_name(self, name: str) -> str:
        return name + BLOCKS

    def shape(self, folder: SafetensorsFolder, name: str) -> tuple[int, int]:
        """(E N, K) of a stack. Raises CapabilityError if its tensors are malformed."""
        experts, outputs, groups = _shape(folder, name)
        return experts * outputs, groups * GROUP

    def rows(self, folder: SafetensorsFolder, name: str, first: int, end: int) -> QuantizedTensor:
        """Rows `first` to `end` of a stack, on the CPU. Raises CapabilityError if a tensor is
        missing or malformed."""
        _, outputs, groups = _shape(folder, name)
        quantized: list[QuantizedTensor] = []
        for expert in range(first // outputs, -(-end // outputs)):
            start = expert * outputs
            low, high = max(first - start, 0), min(end - start, outputs)
            part = _read(folder, name, (expert, low, 0), (1, high - low, groups))
            codes, scales = part.codes[0], part.scales[0]
            quantized.append(QuantizedTensor(part.format, part.columns, codes, scales))
        return cat(quantized)


def _read(
    folder: SafetensorsFolder, name: str, offsets: Sequence[int], sizes: Sequence[int]
) -> QuantizedTensor:
    blocks = folder.box(name + BLOCKS, (*offsets, 0), (*sizes, GROUP // 2))
    return mxfp4_of_blocks(blocks, folder.box(name + SCALES, offsets, sizes))


def _shape(folder: SafetensorsFolder, name: str) -> tuple[int, int, int]:
    """E, N and G."""
    scales = name + SCALES
    if scales not in folder:
        raise malformed(scales, "it is not there")
    blocks, exponents = folder.stored(name + BLOCKS), folder.stored(scales)
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
