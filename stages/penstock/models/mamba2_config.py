"""Hyperparameters of Mamba-2 layers. No torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from penstock.models.state_layer_config import (
    InitialValues,
    SavedNumbers,
    Shape,
    StateLayerConfig,
    config_error,
    require_sizes,
)

# Names in config.json.
FIELDS: Mapping[str, str] = {
    "num_heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "groups": "mamba_n_groups",
    "state_dim": "mamba_d_state",
    "kernel": "mamba_d_conv",
}


@dataclass(frozen=True)
class Mamba2Config(StateLayerConfig):
    """Mamba-2 (Dao and Gu 2024, https://arxiv.org/abs/2405.21060): a short convolution, a
    state-space model, and an RMSNorm of its gated output."""

    num_heads: int
    head_dim: int
    """Features of a head's x, and of its output."""
    groups: int
    """Groups of B and C: as many heads share each."""
    state_dim: int
    """Features of a group's B and C."""
    kernel: int = 4
    """Taps of the convolution."""
    conv_bias: bool = True
    in_bias: bool = False
    """Whether in_proj has a bias."""
    out_bias: bool = False
    """Whether out_proj has a bias."""
    min_step: float = 0.0
    max_step: float = math.inf
    """Time steps are clamped to these."""
    initial_step: InitialValues | float = 1.0
    """What dt_bias is initialized with."""

    module = "mamba"
    heads_field = FIELDS["num_heads"]
    fields: ClassVar[Mapping[str, str]] = FIELDS
    """Names in config.json."""

    def __post_init__(self) -> None:
        require_sizes(self, self.fields)
        if self.num_heads % self.groups:
            raise config_error(
                f"{self.heads_field} ({self.num_heads}) is not a multiple of its "
                f"{self.fields['groups']} ({self.groups})"
            )

    @property
    def heads(self) -> int:
        return self.num_heads

    @property
    def input_layers(self) -> tuple[str, ...]:
        return ("in_proj",)

    @property
    def features(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> Mapping[str, int]:
        """Features that are convolved, in the order of the rows of conv1d."""
        shared = self.groups * self.state_dim
        return {"x": self.features, "B": shared, "C": shared}

    @property
    def projected(self) -> Mapping[str, int]:
        """The blocks of rows of in_proj, in order."""
        return {"z": self.features, **self.channels, "dt": self.num_heads}

    def row_blocks(self, layer: str) -> Mapping[str, int] | None:
        return {"conv1d": self.channels, "in_proj": self.projected}.get(layer)

    def split_heads(self, part: str) -> int:
        return self.groups if part in ("B", "C") else self.num_heads

    def why_unsplit(self, tensor: int) -> str | None:
        # Groups are shared out like key heads: several ranks may have the same one.
        if self.groups % tensor and tensor % self.groups:
            return (
                f"{self.fields['groups']} is {self.groups}: neither do ranks get equally many of "
                "them, nor does each lie on equally many ranks"
            )
        return super().why_unsplit(tensor)

    def shapes(self, width: int) -> Mapping[str, Shape]:
        convolved, rows = (sum(sizes.values()) for sizes in (self.channels, self.projected))
        return {
            "dt_bias": (self.num_heads,),
            "A_log": (self.num_heads,),
            "D": (self.num_heads,),
            "conv1d.weight": (convolved, 1, self.kernel),
            **({"conv1d.bias": (convolved,)} if self.conv_bias else {}),
            "in_proj.weight": (rows, width),
            **({"in_proj.bias": (rows,)} if self.in_bias else {}),
            "norm.weight": (self.features,),
            "out_proj.weight": (width, self.features),
            **({"out_proj.bias": (width,)} if self.out_bias else {}),
        }

    def initial_values(self, leaf: str) -> InitialValues | float | None:
        # As in transformers: the rates at which heads decay are their numbers.
        rates = InitialValues("log_number", 1)
        return {"dt_bias": self.initial_step, "A_log": rates, "D": 1.0}.get(leaf)

    @property
    def output_layer(self) -> tuple[str, int]:
        return "out_proj", self.features

    @property
    def saved(self) -> SavedNumbers:
        # The input and output of the convolution; x times its step; the output of the state-space
        # model, and its gate; for each head its steps and decays.
        convolved = sum(self.channels.values())
        return SavedNumbers(2 * convolved + 3 * self.features, 4 * self.num_heads)

    @property
    def exchanged(self) -> tuple[tuple[int, int], ...]:
        # B and C; x, its step, and the output.
        return (self.groups, 2 * self.state_dim), (self.num_heads, 2 * self.head_dim + 1)

    @property
    def state_size(self) -> int:
        return self.num_heads * self.state_dim * self.head_dim

    @property
    def state_macs(self) -> int:
        # A state is updated with B and x, and read with C.
        return 2 * self.state_size
