"""FP8 training: FP8 matmuls in the linear layers."""

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from penstock.config.schema.base import ConfigSection
from penstock.config.schema.cache_key import KeyedUnlessDefault, Unkeyed
from penstock.config.schema.effect import NativeOnly, NotWith, OnlyWith
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

    hadamard_block_size: Annotated[Literal[16, 32, 64, 128], OnlyWith("train.fp8.hadamard")] = 32
    """Number of features that are transformed together."""

    exclude_modules: Annotated[list[str], AfterValidator(readable)] = Field(
        default_factory=list[str]
    )
    """Linear layers that are not converted, by a part of their names (`self_attn`, `layers.0`), a
    pattern, or a regular expression after `re:`. The embedding, the LM head, routers and experts
    are never converted, nor are layers whose sizes are not multiples of 16."""

    @property
    def of_gradients(self) -> Literal["e4m3", "e5m2"]:
        hybrid = self.recipe == "tensorwise" if self.format is None else self.format == "hybrid"
        return "e5m2" if hybrid else "e4m3"

    @property
    def quantizes_by_rows_alone(self) -> bool:
        """Whether input gradients need weights in other scales than the forward pass."""
        return self.recipe == "rowwise" and self.quantize_input_grad


class Fp8TrainingConfig(ConfigSection):
    """FP8 training."""

    enable_fp8_training: Annotated[
        KeyedUnlessDefault[bool],
        NotWith(
            "lora.enable_qlora",
            why="lora.enable_qlora: true dequantizes base weights and runs their matmuls in the"
            " run's precision",
        ),
        NotWith(
            "train.computes_in",
            ("float16",),
            why="float16 does not have the range of FP8 values and their scales",
            instead="write precision: bf16_mixed, or leave {field} out",
            reads=("train.precision",),
        ),
        NativeOnly(write="train.precision: bfloat16"),
    ] = False
    """FP8 training: run the matmuls of the linear layers of decoder blocks, forward and backward,
    in FP8. Weights, gradients and optimizer states keep their precision. Needs a GPU with FP8 (Ada,
    Hopper or later), where it is faster; CPUs compute the same slowly."""

    fp8: KeyedUnlessDefault[Fp8Config] = Field(default_factory=Fp8Config)
    """FP8 scaling and formats."""

    enable_fp8_all_gather: Annotated[
        Unkeyed[bool],
        FP8,
        NotWith(
            "train.data_parallel_mode",
            unless=("fsdp2",),
            why="{name}: {value} does not all-gather weights",
            instead="write {name}: fsdp2 or leave {field} out",
        ),
        NotWith(
            "train.enable_fsdp_offload",
            why="quantizes weights on the GPU, and {name}: true keeps them in host memory",
        ),
        NotWith(
            "train.enable_compile",
            why="all-gathers a tensor subclass that torch.compile does not support here, and"
            " {name} is true",
        ),
        NotWith(
            "lora.use_dora",
            why="gives layers quantized weights, and lora.use_dora: true needs the norms of the"
            " unquantized rows",
        ),
        NotWith(
            "train.fp8.quantizes_by_rows_alone",
            why="all-gathers weights that are quantized by rows, and gradients of activations need"
            " them quantized by columns",
            instead="write fp8.recipe: tensorwise or blockwise, or fp8.quantize_input_grad: false",
            reads=("train.fp8.recipe", "train.fp8.quantize_input_grad"),
        ),
    ] = False
    """`fsdp2` with `enable_fp8_training`: quantize weights before the all-gather, which halves its
    traffic. Results are the same."""
