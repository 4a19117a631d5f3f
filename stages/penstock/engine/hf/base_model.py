"""Base model weights: their source, their names, and which are quantized."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from penstock.engine.hf.converted_weights import ConvertedWeights, InitializedWeights
from penstock.engine.hf.safetensors_reader import SafetensorsFolder
from penstock.engine.hf.stored_forms import RowChunkReader, TensorParts, parts_in, row_chunks_in
from penstock.engine.model_source import QuantizationArgs
from penstock.engine.quantization.dequantized_folder import DequantizedFolder
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
from penstock.engine.vision.stored_names import checkpoint_names
from penstock.models.automodel.weight_map import AutoWeightMap
from penstock.models.causal_lm import CausalLM
from penstock.models.layers.quantized_linear import keep_quantized
from penstock.models.multimodal import text_name
from penstock.models.tp_roles import Roles
from penstock.models.vision.tower import VisionTower
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
    vision: VisionTower | None = None
    """Its vision part, on the meta device; None where it is not built."""

    @cached_property
    def formats(self) -> Formats:
        """The formats of quantized matrices. Raises ConfigError and CapabilityError."""
        return select_formats(self.quantizing, self.published, self.names, self.roles)

    @cached_property
    def published(self) -> PrequantizedFormat | None:
        checkpoint = published_in(self.hf_config, self.folder)
        if checkpoint is None or not self.names.multimodal:
            return checkpoint
        # The publisher names modules as in the files, with the prefix of the language model.
        ignored = tuple(map(text_name, checkpoint.declared.ignored_modules))
        return replace(checkpoint, declared=replace(checkpoint.declared, ignored_modules=ignored))

    def quantize(self, model: CausalLM) -> None:
        """Replace the layers of a meta-device model, or of a part of one, by quantized ones, in
        place.
        """
        params = dict(model.named_parameters())
        for native, format in quant_formats_by_param(self.formats, self.names).items():
            if native in params:
                keep_quantized(model, native, format)

    def vision_names(self, folder: SafetensorsFolder) -> Mapping[str, str]:
        """The names here of the vision part's tensors, by those in the files; none where it is not
        built."""
        return checkpoint_names(folder.names(), self.vision) if self.vision else {}

    def here(self, folder: SafetensorsFolder) -> SafetensorsFolder:
        """The folder of a multimodal model's files with the names here."""
        of_vision = self.vision_names(folder)
        return folder.renamed(lambda stored: of_vision.get(stored) or text_name(stored))

    def random_init(self, seed: int) -> InitialWeights:
        if isinstance(self.names, AutoWeightMap):
            return InitializedWeights(self.hf_config, self.names, seed)
        return RandomInitTensors(self.names, seed)

    def quantized_reader(
        self,
        inner: SafetensorsFolder | InitialWeights,
        device: torch.device = _CPU,
    ) -> TensorReader:
        """A reader that returns the weights in these formats; rows are quantized on `device`.
        Matrices that are stored quantized and are not in `formats` are dequantized."""
        published = self.published
        source: TensorReader = inner
        folder: SafetensorsFolder | None = None
        if isinstance(inner, SafetensorsFolder):
            if isinstance(self.names, AutoWeightMap):
                floats = DequantizedFolder(inner, published) if published else inner
                source = ConvertedWeights(floats, self.hf_config, self.names)
                folder = source.renamed(inner) if published else None
            else:
                if self.names.multimodal:
                    inner = self.here(inner)
                elif self.names.config.names.earlier:
                    inner = inner.renamed(self.names.config.names.today)
                is_stacked = published is None or published.is_stacked
                source = Mxfp4Tensors(inner) if is_stacked else inner
                if published is None and (parts := parts_in(self.names, inner)):
                    source = TensorParts(inner, parts, self.names)
                if chunks := row_chunks_in(self.names, inner):
                    source = RowChunkReader(source, chunks)
                folder = None if chunks else inner
        if not self.formats and published is None:
            return source
        return QuantizeOnLoad(source, self.formats, published, device, folder)
