"""The weights that a run starts from: which a checkpoint has, and which of them are quantised."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from penstock.engine.hf.safetensors_reader import SafetensorsFolder
from penstock.engine.model_source import QuantizationArgs
from penstock.engine.quantization.prequantized import PrequantizedFormat, published_in
from penstock.engine.quantization.quantized_reader import QuantizeOnLoad, RandomInitTensors
from penstock.engine.quantization.select_layers import (
    Formats,
    quant_formats_by_param,
    select_formats,
)
from penstock.models.decoder import Decoder
from penstock.models.layers.quantized_linear import keep_quantised
from penstock.models.tp_roles import Roles
from penstock.models.weights import WeightMap

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class BaseModelWeights:
    """One base model, before it is known what holds its weights."""

    names: WeightMap
    quantising: QuantizationArgs | None
    """None where weights are as they were stored."""
    hf_config: Mapping[str, Any]
    roles: Roles
    folder: Path | None
    """Where its weights lie; None if they are drawn."""

    @cached_property
    def formats(self) -> Formats:
        """Of the matrices that are quantised. Raises ConfigError and CapabilityError."""
        return select_formats(self.quantising, self.published, self.names, self.roles)

    @cached_property
    def published(self) -> PrequantizedFormat | None:
        """What others have quantised already."""
        return published_in(self.hf_config, self.folder) if self.folder else None

    def quantise(self, model: Decoder) -> None:
        """Let a model, or a part of one, that is on the meta device hold them so, in place."""
        here = dict(model.named_parameters())
        for native, format in quant_formats_by_param(self.formats, self.names).items():
            if native in here:
                keep_quantised(model, native, format)

    def seen(
        self, inner: SafetensorsFolder | RandomInitTensors, device: torch.device = _CPU
    ) -> SafetensorsFolder | RandomInitTensors | QuantizeOnLoad:
        """What such a model sees of its weights; rows are quantised on `device`."""
        if not self.formats and self.published is None:
            return inner
        return QuantizeOnLoad(inner, self.formats, self.published, device)
