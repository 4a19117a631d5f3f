"""Hyperparameters of Kimi Delta Attention. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.models.linear_config import GatedDeltaConfig
from penstock.models.state_layer_config import InitialValues, SavedNumbers, Shape

INITIAL: Mapping[str, InitialValues] = {
    "A_log": InitialValues("log_uniform", 1.0, 16.0),
    "dt_bias": InitialValues("softplus_log_uniform", 1e-3, 0.1, 1e-4),
}
"""As in FLA and transformers."""


@dataclass(frozen=True)
class KimiDeltaConfig(GatedDeltaConfig):
    """Kimi Delta Attention (Kimi Team 2025, https://arxiv.org/abs/2510.26692): the gated delta rule
    with a decay for each channel of a key. Decays, and the gate of the output, are computed through
    `key_dim` features. Key heads and value heads are as many, and as wide."""

    separate: bool = True
    initial: Mapping[str, InitialValues | float] = field(default_factory=lambda: INITIAL)

    module = "self_attn"
    heads_field = "linear_num_heads"

    def shapes(self, width: int) -> Mapping[str, Shape]:
        """The shape of each parameter of a layer, in order, for a hidden size."""
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
        """The input projections."""
        return "q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"

    @property
    def inner_layers(self) -> Mapping[str, int]:
        """The second of two layers that give decays, and of those that give the gate."""
        return dict.fromkeys(("f_b_proj", "g_b_proj"), self.key_dim)

    @property
    def exchanged(self) -> tuple[tuple[int, int], ...]:
        """Queries and keys; values, a step for each channel of a key, a rate, and outputs."""
        sizes = 2 * self.value_dim + self.key_dim + 1
        return (self.key_heads, 2 * self.key_dim), (self.value_heads, sizes)

    @property
    def saved(self) -> SavedNumbers:
        """As Gated DeltaNet; and for each channel of a key the steps and decays."""
        saved, channels = super().saved, self.channels["k"]
        return SavedNumbers(saved.computed, saved.fp32 + 4 * channels)
