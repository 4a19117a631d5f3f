"""Hyperparameters of linear attention layers. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.models.state_layer_config import (
    InitialValues,
    SavedNumbers,
    Shape,
    StateLayerConfig,
    config_error,
    require_sizes,
)

FIELDS: Mapping[str, str] = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "kernel": "linear_conv_kernel_dim",
}
"""Names in config.json."""


# The layers of a checkpoint whose rows are a layer's, in FLA's names.
SEPARATE: Mapping[str, tuple[str, ...]] = {
    "in_proj_qkv": ("q_proj", "k_proj", "v_proj"),
    "in_proj_z": ("g_proj",),
    "in_proj_b": ("b_proj",),
    "in_proj_a": ("a_proj",),
    "conv1d": ("q_conv1d", "k_conv1d", "v_conv1d"),
    "norm": ("o_norm",),
    "out_proj": ("o_proj",),
}

# As in transformers for Qwen3-Next: time steps of one, and decay rates between 0.01 and 16.
INITIAL: Mapping[str, InitialValues | float] = {
    "dt_bias": 1.0,
    "A_log": InitialValues("log_uniform", 0.01, 16),
}


@dataclass(frozen=True)
class GatedDeltaConfig(StateLayerConfig):
    """Gated DeltaNet (Yang et al. 2024, https://arxiv.org/abs/2412.06464) as in Qwen3-Next: a short
    convolution, the gated delta rule, and a gated RMSNorm of each head's output."""

    key_heads: int
    """Heads of queries and keys (linear_num_key_heads)."""
    value_heads: int
    """Heads of values (linear_num_value_heads): as many for each key head."""
    key_dim: int
    """Features of a head's queries and keys (linear_key_head_dim)."""
    value_dim: int
    """Features of a head's values (linear_value_head_dim)."""
    kernel: int = 4
    """Taps of the convolution (linear_conv_kernel_dim)."""
    fused: bool = False
    """Whether checkpoints have two input projections, in_proj_qkvz and in_proj_ba, with the rows of
    each key head together; otherwise in_proj_qkv, in_proj_z, in_proj_b and in_proj_a."""
    separate: bool = False
    """Whether checkpoints have queries, keys and values as layers of their own, with FLA's names:
    those of `SEPARATE`."""
    doubles_rates: bool = False
    """Whether rates of the delta rule are between 0 and 2, which makes the eigenvalues of a state's
    transition negative too (Grazzi et al. 2024, https://arxiv.org/abs/2411.12537)."""
    norm_eps: float | None = None
    """Epsilon of the gated norm; None: `rms_norm_eps`."""
    initial: Mapping[str, InitialValues | float] = field(default_factory=lambda: INITIAL)
    """Initial values of the parameters with these names."""

    heads_field = "linear_num_key_heads"

    def __post_init__(self) -> None:
        require_sizes(self, FIELDS)
        if self.value_heads % self.key_heads:
            raise config_error(
                f"linear_num_value_heads ({self.value_heads}) is not a multiple of its "
                f"linear_num_key_heads ({self.key_heads})"
            )

    @property
    def heads(self) -> int:
        return self.key_heads

    @property
    def values_per_key(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def group_channels(self) -> tuple[int, int, int]:
        """Features of queries, keys and values of one key head, which are convolved."""
        return self.key_dim, self.key_dim, self.values_per_key * self.value_dim

    @property
    def channels(self) -> Mapping[str, int]:
        """Features that are convolved: queries, keys and values, in the order of the rows of conv1d
        and in_proj_qkv."""
        sizes = (self.key_heads * count for count in self.group_channels)
        return dict(zip(("q", "k", "v"), sizes, strict=True))

    def row_blocks(self, layer: str) -> Mapping[str, int] | None:
        return self.channels if layer in ("conv1d", "in_proj_qkv") else None

    def stored(self, name: str, shape: Shape) -> Mapping[str, Shape]:
        layer, _, leaf = name.partition(".")
        if not self.separate or layer not in SEPARATE:
            return {name: shape}
        parts = SEPARATE[layer]
        rows = self.channels.values() if len(parts) > 1 else shape[:1]
        return {
            f"{part}.{leaf}": (count, *shape[1:]) for part, count in zip(parts, rows, strict=True)
        }

    def shapes(self, width: int) -> Mapping[str, Shape]:
        convolved, values = sum(self.channels.values()), self.channels["v"]
        if self.fused:
            inputs = {"in_proj_qkvz": convolved + values, "in_proj_ba": 2 * self.value_heads}
        else:
            inputs = {"in_proj_qkv": convolved, "in_proj_z": values}
            inputs |= dict.fromkeys(("in_proj_b", "in_proj_a"), self.value_heads)
        return {
            "dt_bias": (self.value_heads,),
            "A_log": (self.value_heads,),
            "conv1d.weight": (convolved, 1, self.kernel),
            **{f"{name}.weight": (rows, width) for name, rows in inputs.items()},
            "norm.weight": (self.value_dim,),
            "out_proj.weight": (width, values),
        }

    def initial_values(self, leaf: str) -> InitialValues | float | None:
        return self.initial.get(leaf)

    @property
    def input_layers(self) -> tuple[str, ...]:
        if self.fused:
            return "in_proj_qkvz", "in_proj_ba"
        inputs = "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"
        if not self.separate:
            return inputs
        return tuple(part for layer in inputs for part in SEPARATE[layer])

    @property
    def output_layer(self) -> tuple[str, int]:
        return "o_proj" if self.separate else "out_proj", self.channels["v"]

    @property
    def saved(self) -> SavedNumbers:
        # The input of the convolution, which in the fused layout is a copy beside the projection
        # that has the gate; queries, keys and values after it, queries and keys again in fp32 and
        # of length 1; the output of the delta rule and, in fp32, its deltas; for each value head
        # the steps, decays and rates.
        convolved, values = sum(self.channels.values()), self.channels["v"]
        keys = convolved - values
        return SavedNumbers(
            (2 + self.fused) * convolved + 2 * values + keys + 2 * self.value_heads,
            2 * keys + values + 5 * self.value_heads,
        )

    @property
    def exchanged(self) -> tuple[tuple[int, int], ...]:
        # Queries and keys; values, two numbers for rates and steps, and outputs.
        return (self.key_heads, 2 * self.key_dim), (self.value_heads, 2 * self.value_dim + 2)

    @property
    def state_size(self) -> int:
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def state_macs(self) -> int:
        # A state is read for its key, updated, and read for its query.
        return 3 * self.state_size


# The same of Kimi Linear, as in FLA and transformers.
KIMI_INITIAL: Mapping[str, InitialValues] = {
    "A_log": InitialValues("log_uniform", 1.0, 16.0),
    "dt_bias": InitialValues("softplus_log_uniform", 1e-3, 0.1, 1e-4),
}


@dataclass(frozen=True)
class KimiDeltaConfig(GatedDeltaConfig):
    """Kimi Delta Attention (Kimi Team 2025, https://arxiv.org/abs/2510.26692): the gated delta rule
    with a decay for each channel of a key. Decays, and the gate of the output, are computed through
    `key_dim` features. Key heads and value heads are as many, and as wide."""

    separate: bool = True
    initial: Mapping[str, InitialValues | float] = field(default_factory=lambda: KIMI_INITIAL)

    module = "self_attn"
    heads_field = "linear_num_heads"

    def shapes(self, width: int) -> Mapping[str, Shape]:
        heads, inner = self.key_heads, self.key_dim
        channels = heads * inner
        layers = {
            "in_proj_qkv": (3 * channels, width),
            "in_proj_b": (heads, width),
            "f_a_proj": (inner, width),
            "f_b_proj": (channels, inner),
            "g_a_proj": (inner, width),
            "g_b_proj": (channels, inner),
        }
        return {
            "dt_bias": (channels,),
            "A_log": (1, 1, heads, 1),
            "conv1d.weight": (3 * channels, 1, self.kernel),
            **{f"{name}.weight": shape for name, shape in layers.items()},
            "norm.weight": (self.value_dim,),
            "out_proj.weight": (width, channels),
        }

    @property
    def input_layers(self) -> tuple[str, ...]:
        return "q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"

    @property
    def inner_layers(self) -> Mapping[str, int]:
        # The second of two layers that give decays, and of those that give the gate.
        return dict.fromkeys(("f_b_proj", "g_b_proj"), self.key_dim)

    @property
    def exchanged(self) -> tuple[tuple[int, int], ...]:
        # Queries and keys; values, a step for each channel of a key, a rate, and outputs.
        sizes = 2 * self.value_dim + self.key_dim + 1
        return (self.key_heads, 2 * self.key_dim), (self.value_heads, sizes)

    @property
    def saved(self) -> SavedNumbers:
        # As Gated DeltaNet; and for each channel of a key the steps and decays.
        saved, channels = super().saved, self.channels["k"]
        return SavedNumbers(saved.computed, saved.fp32 + 4 * channels)
