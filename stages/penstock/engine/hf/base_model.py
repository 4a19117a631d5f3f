"""Base model weights: their source, their names, and which are quantized."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from penstock.engine.hf.converted_weights import ConvertedWeights, InitializedWeights
from penstock.engine.hf.safetensors_reader import SafetensorsFolder
from penstock.engine.model_source import QuantizationArgs
from penstock.engine.quantization.mxfp4 import Mxfp4Tensors
from penstock.engine.quantization.prequantized import PrequantizedFormat, published_in
from penstock.engine.quantization.quantized_reader import (
    QuantizeOnLoad,
    RandomInitTensors,
    TensorReader,
)
from penstock.engine.quantization.select_layers import (
    Formats,
    quant_formats_by_param,
    select_formats,
)
from penstock.models.automodel.weight_map import AutoWeightMap
from penstock.models.causal_lm import CausalLM
from penstock.models.layers.quantized_linear import keep_quantized
from penstock.models.multimodal import text_name
from penstock.models.tp_roles import Roles
from penstock.models.weights import WeightMap

InitialWeights = RandomInitTensors | InitializedWeights

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class BaseModelWeights:
    """One base model's weights, independent of the parallel layout."""

    names: WeightMap
    quantizing: QuantizationArgs | None
    """None if weights are used as stored."""
    hf_config: Mapping[str, Any]
    roles: Roles
    folder: Path | None
    """The folder of its weights; None for a random initialization, or where none are read."""

    @cached_property
    def formats(self) -> Formats:
        """The formats of quantized matrices. Raises ConfigError and CapabilityError."""
        return select_formats(self.quantizing, self.published, self.names, self.roles)

    @cached_property
    def published(self) -> PrequantizedFormat | None:
        """The format of a pre-quantized checkpoint."""
        found = published_in(self.hf_config, self.folder)
        if found is None or not self.names.multimodal:
            return found
        ignored = tuple(map(text_name, found.ignored_modules))
        return replace(found, declared=replace(found.declared, ignored_modules=ignored))

    def quantize(self, model: CausalLM) -> None:
        """Replace the layers of a meta-device model, or of a part of one, by quantized ones, in
        place.
        """
        here = dict(model.named_parameters())
        for native, format in quant_formats_by_param(self.formats, self.names).items():
            if native in here:
                keep_quantized(model, native, format)

    def random_init(self, seed: int) -> InitialWeights:
        """A reader of random weights from a seed."""
        if isinstance(self.names, AutoWeightMap):
            return InitializedWeights(self.hf_config, self.names, seed)
        return RandomInitTensors(self.names, seed)

    def quantized_reader(
        self,
        inner: SafetensorsFolder | InitialWeights,
        device: torch.device = _CPU,
    ) -> TensorReader:
        """A reader that returns the weights in these formats; rows are quantized on `device`.

        Matrices that are stored quantized and are not in `formats` are dequantized.
        """
        published = self.published
        source: TensorReader = inner
        if isinstance(inner, SafetensorsFolder):
            if isinstance(self.names, AutoWeightMap):
                source = ConvertedWeights(inner, self.hf_config, self.names)
            else:
                inner = inner.renamed(text_name) if self.names.multimodal else inner
                is_stacked = published is None or published.is_stacked
                source = Mxfp4Tensors(inner) if is_stacked else inner
        if not self.formats and published is None:
            return source
        return QuantizeOnLoad(source, self.formats, published, device)
