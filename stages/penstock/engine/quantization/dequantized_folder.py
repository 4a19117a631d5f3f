"""A folder of published weights as if they were not quantized.

transformers' conversions (`engine/hf/converted_weights.py`) take tensors by the names of
unquantized files: a quantized matrix has its own name and shape here, and its scales have none.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import torch

from penstock.engine.hf.safetensors_reader import SafetensorsFolder, Stored
from penstock.engine.quantization.prequantized import PrequantizedFormat
from penstock_kernels.quant import dequantize

# A tensor of a quantized matrix beside, or in place of, the one with the weight's name.
COMPONENT = re.compile(r"(?P<weight>.+\.weight)(?P<rest>[._].+)$")


def split_component(stored: str) -> tuple[str, str]:
    """The name of the weight that a tensor may be a component of, and the rest of the tensor's."""
    component = COMPONENT.match(stored)
    return (component["weight"], component["rest"]) if component else (stored, "")


class DequantizedFolder:
    """The tensors of a folder by the names of unquantized files; quantized matrices are float32."""

    def __init__(self, folder: SafetensorsFolder, published: PrequantizedFormat) -> None:
        self.folder, self._reader = folder, published.reader

    @cached_property
    def quantized(self) -> Mapping[str, tuple[int, int]]:
        """The shapes of the quantized matrices. Raises CapabilityError for malformed ones."""
        reader, folder = self._reader, self.folder
        weights = dict.fromkeys(split_component(name)[0] for name in folder.names())
        return {
            name: reader.shape(folder, name)
            for name in weights
            if reader.is_quantized(folder, name)
        }

    def names(self) -> list[str]:
        """The names of all tensors, without components of quantized matrices."""
        plain = (n for n in self.folder.names() if split_component(n)[0] not in self.quantized)
        return [*plain, *self.quantized]

    def stored(self, name: str) -> Stored:
        if name not in self.quantized:
            return self.folder.stored(name)
        first = self.folder.stored(self._reader.codes_tensor_name(name)).start
        return Stored(self.quantized[name], torch.float32, first)

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self.stored(name).shape
        return self.box(name, (0,) * len(shape), shape)

    def box(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        if name not in self.quantized:
            return self.folder.box(name, offsets, sizes)
        (first, column), (count, width) = offsets, sizes
        rows = self._reader.rows(self.folder, name, first, first + count)
        return dequantize(rows, torch.float32)[:, column : column + width]

    def order(self, name: str) -> tuple[str, int]:
        quantized = name in self.quantized
        return self.folder.order(self._reader.codes_tensor_name(name) if quantized else name)

    def require(self, names: Iterable[str]) -> None:
        self.folder.require(name for name in names if name not in self.quantized)
