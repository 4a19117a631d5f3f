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
        """Whether it takes images or audio."""
        return self.config.outline.media is not None

    @property
    def absent_parts(self) -> tuple[str, ...]:
        """The vision tower, if it is not built."""
        media = self.config.outline.media
        return media.vision if media and media.absent else ()

    def native_names(self) -> tuple[str, ...]:
        """The model's parameters, without tied copies."""
        return tuple(self.config.outline.params)

    def native_shape(self, native_name: str) -> Shape:
        """The shape of a parameter."""
        return self.config.outline.params[native_name]

    def hf_names(self, native_name: str) -> tuple[str, ...]:
        """The name itself."""
        return (native_name,)

    def hf_layer(self, layer: str) -> str:
        """The name itself."""
        return layer

    def expert_layers(self, matrix: str, layer: str) -> tuple[str, ...]:
        """None: experts with adapters are stacked."""
        del matrix, layer
        return ()

    @property
    def num_experts(self) -> int:
        """Experts in the stacked tensors; 0 without any."""
        outline = self.config.outline
        return next((outline.params[name][0] for name in outline.stacked), 0)

    @property
    def has_stacked_experts(self) -> bool:
        """Whether a layer has one tensor for all experts."""
        return bool(self.config.outline.stacked)

    def stack_parameter(self, native_name: str) -> str:
        """The name itself."""
        return native_name

    def is_transposed(self, native_name: str) -> bool:
        """Whether the matrices of this stacked tensor are [in, out]."""
        return self.config.outline.stacked[native_name]

    def hf_shapes(self) -> Mapping[str, Shape]:
        """The shape of every parameter."""
        return self.config.outline.params

    def is_exact(self, hf_name: str) -> bool:
        """Whether the model keeps this tensor in fp32."""
        return hf_name in self.config.outline.fp32
