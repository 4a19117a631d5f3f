"""Names and shapes of a transformers model's tensors, with the interface of `weights.WeightMap`.

Training checkpoints have the model's own state-dict names. Where files of published weights differ
(`engine/hf/converted_weights.py`), they are converted when they are read and written.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.models.automodel.outline import AutoModelConfig
from penstock.models.weights import Shape, WeightMap


@dataclass(frozen=True)
class AutoWeightMap(WeightMap):
    """Every native tensor is a tensor of the same name."""

    config: AutoModelConfig

    @property
    def is_multimodal(self) -> bool:
        return self.config.outline.media is not None

    @property
    def absent_parts(self) -> tuple[str, ...]:
        media = self.config.outline.media
        return media.vision if media and media.absent else ()

    def native_names(self) -> tuple[str, ...]:
        return tuple(self.config.outline.params)

    def native_shape(self, native_name: str) -> Shape:
        return self.config.outline.params[native_name]

    def hf_names(self, native_name: str) -> tuple[str, ...]:
        return (native_name,)

    def hf_layer(self, layer: str) -> str:
        return layer

    def expert_layers(self, matrix: str, layer: str) -> tuple[str, ...]:
        del matrix, layer
        return ()  # experts with adapters are stacked

    @property
    def num_experts(self) -> int:
        outline = self.config.outline
        return next((outline.params[name][0] for name in outline.stacked), 0)

    @property
    def has_stacked_experts(self) -> bool:
        return bool(self.config.outline.stacked)

    def stack_parameter(self, native_name: str) -> str:
        return native_name

    def is_transposed(self, native_name: str) -> bool:
        return self.config.outline.stacked[native_name]

    def hf_shapes(self) -> Mapping[str, Shape]:
        return self.config.outline.params

    def is_exact(self, hf_name: str) -> bool:
        return hf_name in self.config.outline.fp32
