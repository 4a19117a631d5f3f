"""Hyperparameters of linear attention layers. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.core.errors import ConfigError

MODEL_TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""The model types with such layers."""

FIELDS: Mapping[str, str] = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "kernel": "linear_conv_kernel_dim",
}
"""Names in config.json."""


@dataclass(frozen=True)
class GatedDeltaConfig:
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

    def __post_init__(self) -> None:
        """Raise an error for sizes that are not positive integers, and for value heads that key
        heads cannot share out."""
        for name, field in FIELDS.items():
            size = getattr(self, name)
            if type(size) is not int or size < 1:
                raise _config_error(f"{field} is {size!r}; it must be an integer of 1 or more")
        if self.value_heads % self.key_heads:
            raise _config_error(
                f"linear_num_value_heads ({self.value_heads}) is not a multiple of its "
                f"linear_num_key_heads ({self.key_heads})"
            )

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
        """The blocks of rows of a layer, each of which has all key heads in order; None: one."""
        return self.channels if layer in ("conv1d", "in_proj_qkv") else None

    def shapes(self, width: int) -> Mapping[str, tuple[int, ...]]:
        """The shape of each parameter of a layer, in order, for a hidden size."""
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

    def matmul_params(self, width: int) -> int:
        """Parameters of the projections of a layer, for a hidden size."""
        shapes = self.shapes(width).values()
        return sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)

    @property
    def state_size(self) -> int:
        """Numbers in the state of a layer, for one sequence."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def state_macs(self) -> int:
        """Multiplications of one token with the states of a layer: a state is read for its key,
        updated, and read for its query."""
        return 3 * self.state_size


def _config_error(fault: str) -> ConfigError:
    return ConfigError(
        f"the model's {fault}. Correct the config.json that model.config_path names."
    )
