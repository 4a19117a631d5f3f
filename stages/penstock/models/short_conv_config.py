"""Hyperparameters of gated short convolutions. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.models.state_layer_config import SavedNumbers, Shape, StateLayerConfig, require_sizes

# Names in config.json.
FIELDS: Mapping[str, str] = {"channels": "hidden_size", "kernel": "conv_L_cache"}


@dataclass(frozen=True)
class ShortConvConfig(StateLayerConfig):
    """A gated short convolution, as in LFM2: a depthwise convolution of gated channels, and a gate
    of its output."""

    channels: int
    """Channels of the convolution (hidden_size)."""
    kernel: int = 3
    """Taps of the convolution (conv_L_cache)."""
    bias: bool = False
    """Whether the projections and the convolution have biases (conv_bias)."""

    module = "conv"
    layer_type = "conv"
    heads_field = "hidden_size"

    def __post_init__(self) -> None:
        require_sizes(self, FIELDS)

    @property
    def heads(self) -> int:
        return self.channels

    def shapes(self, width: int) -> Mapping[str, Shape]:
        weights: dict[str, Shape] = {
            "conv": (self.channels, 1, self.kernel),
            "in_proj": (3 * self.channels, width),
            "out_proj": (width, self.channels),
        }
        shapes: dict[str, Shape] = {}
        for name, shape in weights.items():
            shapes[f"{name}.weight"] = shape
            if self.bias:
                shapes[f"{name}.bias"] = shape[:1]
        return shapes

    def row_blocks(self, layer: str) -> Mapping[str, int] | None:
        # Gates of the input, gates of the output and inputs are blocks of rows.
        return dict.fromkeys(("B", "C", "x"), self.channels) if layer == "in_proj" else None

    @property
    def input_layers(self) -> tuple[str, ...]:
        return ("in_proj",)

    @property
    def output_layer(self) -> tuple[str, int]:
        return "out_proj", self.channels

    @property
    def saved(self) -> SavedNumbers:
        # The output of in_proj, and the input and the output of the convolution.
        return SavedNumbers(5 * self.channels)

    @property
    def exchanged(self) -> tuple[tuple[int, int], ...]:
        # The input and the output of the convolution.
        return ((self.channels, 2),)

    @property
    def state_size(self) -> int:
        # The inputs of the convolution that its next token reads.
        return (self.kernel - 1) * self.channels

    @property
    def state_macs(self) -> int:
        # Each channel has a product for each tap.
        return self.kernel * self.channels
