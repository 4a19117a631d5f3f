"""FP8 training: FP8 matmuls in the linear layers."""

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from penstock.config.schema.base import ConfigSection
from penstock.config.schema.cache_key import KeyedUnlessDefault, Unkeyed
from penstock.config.schema.effect import OnlyWith
from penstock.config.schema.quantization import readable

FP8 = OnlyWith("train.enable_fp8_training", why="there is no FP8 training with {name}: {value}")


class Fp8Config(ConfigSection):
    """Quantization to FP8. Scales are powers of two and dynamic: computed from the tensor that is
    quantized."""

    conditions: ClassVar[tuple[OnlyWith, ...]] = (FP8,)

    recipe: Literal["tensorwise", "rowwise", "blockwise"] = "rowwise"
    """Scaling granularity: `tensorwise`, one scale for a tensor, the fastest; `rowwise`, one for
    each row or column along the contraction dimension, so that an outlier token does not affect the
    others; `blockwise`, one for 128 values of it, and for tiles of 128 x 128 of weights, as in
    DeepSeek-V3."""

    format: Literal["hybrid", "e4m3"] | None = None
    """FP8 format of output gradients: e5m2 (2 mantissa bits, a wider range) with `hybrid`, e4m3
    with `e4m3`. Weights and activations are always e4m3 (3 mantissa bits). Unset: `hybrid` with
    `tensorwise`, where large and small gradients share a scale, `e4m3` with the other recipes."""

    quantize_input_grad: bool = True
    """Use FP8 for the gradients of activations; false computes them exactly, from the quantized
    weights."""

    quantize_weight_grad: bool = True
    """Use FP8 for the gradients of weights; false computes them exactly, from the unquantized
    activations."""

    hadamard: bool = False
    """Apply a block-diagonal Hadamard transform to activations and weights before quantization,
    which distributes outlier features over their neighbors."""

    hadamard_block_size: Annotated[
        Literal[16, 32, 64, 128], FP8, OnlyWith("train.fp8.hadamard")
    ] = 32
    """Number of features that are transformed together."""

    exclude_modules: Annotated[list[str], AfterValidator(readable)] = Field(
        default_factory=list[str]
    )
    """Linear layers that are not converted, by a part of their names (`self_attn`, `layers.0`), a
    pattern, or a regular expression after `re:`. The embedding, the LM head, routers and experts
    are never converted, nor are layers whose sizes are not multiples of 16."""

    @property
    def of_gradients(self) -> Literal["e4m3", "e5m2"]:
        """FP8 format of output gradients."""
        hybrid = self.recipe == "tensorwise" if self.format is None else self.format == "hybrid"
        return "e5m2" if hybrid else "e4m3"


class Fp8TrainingConfig(ConfigSection):
    """FP8 training."""

    enable_fp8_training: KeyedUnlessDefault[bool] = False
    """FP8 training: run the matmuls of the linear layers of decoder blocks, forward and backward,
    in FP8. Weights, gradients and optimizer states keep their precision. Needs a GPU with FP8 (Ada,
    Hopper or later), where it is faster; CPUs compute the same slowly."""

    fp8: KeyedUnlessDefault[Fp8Config] = Field(default_factory=Fp8Config)
    """FP8 scaling and formats."""

    enable_fp8_all_gather: Annotated[Unkeyed[bool], FP8] = False
    """`fsdp2` with `enable_fp8_training`: quantize weights before the all-gather, which halves its
    traffic. Results are the same."""
