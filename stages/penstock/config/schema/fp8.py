"""Training with products of 8 bits."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from penstock.config.schema.base import ConfigSection
from penstock.config.schema.cache_key import KeyedUnlessDefault, Unkeyed
from penstock.config.schema.quantization import readable


class Fp8Config(ConfigSection):
    """How numbers are rounded to 8 bits. Scales are powers of two, found anew for each tensor."""

    recipe: Literal["tensorwise", "rowwise", "blockwise"] = "rowwise"
    """What shares a scale: `tensorwise`, a whole tensor, which is fastest; `rowwise`, the numbers
    that are multiplied and added to one, so that a large token leaves the others alone;
    `blockwise`, 128 of these, and of weights tiles of 128 x 128, as in DeepSeek-V3."""

    format: Literal["hybrid", "e4m3"] | None = None
    """Weights and activations have 3 bits of fraction (e4m3). Gradients of outputs have 2 and a
    wider range (e5m2) with `hybrid`, and 3 as well with `e4m3`. Unset: `hybrid` with `tensorwise`,
    where large and small ones share a scale, and `e4m3` with the other recipes."""

    quantize_input_grad: bool = True
    """Round also where the gradients of activations are computed; false computes them exactly, by
    the rounded weights."""

    quantize_weight_grad: bool = True
    """Round also where the gradients of weights are computed; false computes them exactly, by the
    activations as they came."""

    hadamard: bool = False
    """Turn activations and weights by a block-diagonal Hadamard matrix before they are rounded, so
    that large features are shared out over their neighbours."""

    hadamard_block_size: Literal[16, 32, 64, 128] = 32
    """Features that are turned together."""

    exclude_modules: Annotated[list[str], AfterValidator(readable)] = Field(
        default_factory=list[str]
    )
    """Linear layers that are left alone, by a part of their names (`self_attn`, `layers.0`), a
    pattern or `re:` and a regular expression. The embedding, the head, routers and experts always
    are, and layers whose sizes are no multiples of 16."""

    @property
    def of_gradients(self) -> Literal["e4m3", "e5m2"]:
        """What gradients of outputs are rounded to."""
        hybrid = self.recipe == "tensorwise" if self.format is None else self.format == "hybrid"
        return "e5m2" if hybrid else "e4m3"


class Fp8TrainingConfig(ConfigSection):
    """Products of 8 bits in a training step."""

    enable_fp8_training: KeyedUnlessDefault[bool] = False
    """Compute the products of linear layers within blocks, and of their gradients, from numbers of
    8 bits. Weights, gradients and optimizer states keep their precision. Needs a GPU with such
    numbers (Ada, Hopper or later), where it is faster; CPUs compute the same slowly."""

    fp8: KeyedUnlessDefault[Fp8Config] = Field(default_factory=Fp8Config)
    """How they are rounded."""

    enable_fp8_all_gather: Unkeyed[bool] = False
    """`fsdp2` with `enable_fp8_training`: round weights before they are gathered, so that half as
    many bytes travel. What is computed stays the same."""
