"""The weights that a run starts from: which a checkpoint has, and which of them are quantised."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from penstock.engine.hf.safetensors_reader import SafetensorsFolder
from penstock.engine.model_source import Quantising
from penstock.engine.quantization.prequantized import Published, published_in
from penstock.engine.quantization.quantized_reader import Drawn, QuantisedFolder
from penstock.engine.quantization.select_layers import Formats, formats_of, native_formats
from penstock.models.decoder import Decoder
from penstock.models.layers.quantized_linear import keep_quantised
from penstock.models.tp_roles import Roles
from penstock.models.weights import WeightMap

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Base:
    """One base model, before it is known what holds its weights."""

    names: WeightMap
    quantising: Quantising | None
    """None where weights are as they were stored."""
    hf_config: Mapping[str, Any]
    roles: Roles
    folder: Path | None
    """Where its weights lie; None if they are drawn."""

    @cached_property
    def formats(self) -> Formats:
        """Of the matrices that are quantised. Raises ConfigError and CapabilityError."""
        return formats_of(self.quantising, self.published, self.names, self.roles)

    @cached_property
    def published(self) -> Published | None:
        """What others have quantised already."""
        return published_in(self.hf_config, self.folder) if self.folder else None

    def quantise(self, model: Decoder) -> None:
        """Let a model, or a part of one, that is on the meta device hold them so, in place."""
        here = dict(model.named_parameters())
        for native, format in native_formats(self.formats, self.names).items():
            if native in here:
                keep_quantised(model, native, format)

    def seen(
        self, inner: SafetensorsFolder | Drawn, device: torch.device = _CPU
    ) -> SafetensorsFolder | Drawn | QuantisedFolder:
        """What such a model sees of its weights; rows are quantised on `device`."""
        if not self.formats and self.published is None:
            return inner
        return QuantisedFolder(inner, self.formats, self.published, device)
