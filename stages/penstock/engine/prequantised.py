"""Checkpoints that are published quantised: their matrices, read by rows and used as they are.

What a configuration declares is judged in `penstock.models.published`; here are the tensors. Which
of them are quantised is seen in the files: a publisher's words of what it left alone are patterns
of several dialects.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.core.errors import CapabilityError
from penstock.core.files import read_json
from penstock.engine.published_nf4 import Nf4, group_in
from penstock.engine.published_tensors import InRows
from penstock.engine.safetensors_folder import SafetensorsFolder
from penstock.models.published import INSTEAD, Declared, Publisher, declared_in
from penstock_kernels.quant import Format, Quantised, format_named

MODELOPT = "hf_quant_config.json"


@dataclass(frozen=True)
class Published:
    """How a checkpoint's matrices are quantised already."""

    declared: Declared
    format: Format

    @property
    def publisher(self) -> Publisher:
        """Whose layout its tensors have."""
        return self.declared.publisher

    @property
    def untouched(self) -> tuple[str, ...]:
        """Modules left in floats, as published."""
        return self.declared.untouched

    def is_quantised(self, folder: SafetensorsFolder, name: str) -> bool:
        """Whether this weight is stored quantised, whatever the configuration says of it."""
        return self._reader.is_quantised(folder, name)

    def codes_of(self, name: str) -> str:
        """The tensor that holds the codes of a quantised weight."""
        return self._reader.codes_of(name)

    def shape(self, folder: SafetensorsFolder, name: str) -> tuple[int, int]:
        """Rows and columns of a quantised weight.

        Raises:
            CapabilityError: its codes are missing, or not of the format.
        """
        return self._reader.shape(folder, name)

    def rows(self, folder: SafetensorsFolder, name: str, first: int, end: int) -> Quantised:
        """Rows `first` to `end` of a quantised weight, on the CPU; reads their bytes alone.

        Raises:
            CapabilityError: a tensor is missing, or not of the format.
        """
        return self._reader.rows(folder, name, first, end)

    @cached_property
    def _reader(self) -> InRows | Nf4:
        if self.publisher == "bitsandbytes":
            return Nf4(self.format)
        return InRows(self.format, self.publisher)


def published_in(hf_config: Mapping[str, Any], folder: Path | None = None) -> Published | None:
    """How a model's matrices are published; None if they are plain floats.

    `folder`, which holds the weights, tells what config.json leaves out: ModelOpt's own file beside
    it, and how many columns share a scale in bitsandbytes' NF4 (64 without a folder).

    Raises:
        CapabilityError: they are quantised in a way that is not read.
    """
    beside = folder / MODELOPT if folder else None
    declared = declared_in(hf_config, read_json(beside) if beside and beside.is_file() else None)
    if declared is None:
        return None
    if folder and declared.publisher == "bitsandbytes":
        with SafetensorsFolder(folder) as tensors:
            declared = replace(declared, group=group_in(tensors))
    try:
        format = format_named(declared.format, declared.group)
    except ValueError as error:
        raise CapabilityError(f"quantization_config: {error}.\n  {INSTEAD}.") from error
    return Published(replace(declared, group=format.group), format)
