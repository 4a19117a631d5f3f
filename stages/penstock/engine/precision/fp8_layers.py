"""Select the linear layers for FP8 training (`train.enable_fp8_training`).

Linear layers in transformer blocks are converted: those of attention and of dense feed-forward
networks. The embedding, the LM head, routers and experts are not. The choice does not depend on the
layout. Checked before any process starts: no torch here.
"""

from dataclasses import dataclass, field

from penstock.config.schema.fp8 import Fp8Config
from penstock.config.schema.quantization import is_among
from penstock.config.schema.train import TrainConfig
from penstock.core.errors import CapabilityError
from penstock.engine.quantization.validate_settings import fused, require_known
from penstock.models.tp_roles import ParallelStyle, Roles, find_parallel_style
from penstock.models.weights import WeightMap

MULTIPLE = 16
"""Tensor cores need rows and columns in multiples of this."""

TILE = 128

CAPABILITY = (8, 9)

FIELD = "train.fp8.exclude_modules"


@dataclass(frozen=True)
class Float8Layers:
    """The converted layers, by native module name."""

    chosen: dict[str, ParallelStyle] = field(default_factory=dict[str, ParallelStyle])
    uneven: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """Layers whose sizes are not suitable."""
    excluded: tuple[str, ...] = ()
    num_experts: int = 0
    """Experts per MoE layer; they are computed in the model's own precision."""

    def description(self, fp8: Fp8Config) -> str:
        line = f"train.enable_fp8_training: {len(self.chosen)} linear layers in float8"
        line += f" ({fp8.recipe}, gradients {fp8.of_gradients}"
        line += ", turned)" if fp8.hadamard else ")"
        if self.num_experts:
            line += f"; the {self.num_experts} experts of each layer are not"
        if self.excluded:
            line += f"; {len(self.excluded)} excluded"
        if self.uneven:
            first, (rows, columns) = next(iter(self.uneven.items()))
            line += f"; {len(self.uneven)} not, whose sizes are no multiples of {_unit(fp8)}"
            line += f" ({first} is {rows} x {columns})"
        return line


def float8_layers(train: TrainConfig, names: WeightMap, roles: Roles) -> Float8Layers:
    """The FP8 layers of a model. Raises ConfigError if an entry of `exclude_modules` matches
    nothing, and CapabilityError if no layer would be converted, or only a part of one."""
    fp8 = train.fp8
    require_known(FIELD, fp8.exclude_modules, names)
    layers, excluded = Float8Layers(), list[str]()
    for name in names.native_names():
        native, _, leaf = name.rpartition(".")
        role = find_parallel_style(native, roles)
        if leaf != "weight" or role not in (ParallelStyle.COLWISE, ParallelStyle.ROWWISE):
            continue
        parts = [tensor.removesuffix(".weight") for tensor in names.hf_names(name)]
        excluded_parts = [part for part in parts if is_among(fp8.exclude_modules, part)]
        rows, columns = names.native_shape(name)
        if excluded_parts and len(excluded_parts) < len(parts):
            raise CapabilityError(fused(FIELD, excluded_parts[0]))
        if excluded_parts:
            excluded.append(native)
        elif rows % MULTIPLE or columns % _unit(fp8):
            layers.uneven[native] = rows, columns
        else:
            layers.chosen[native] = role
    if not layers.chosen:
        why = f"{FIELD} leaves out the rest" if excluded else "they are too uneven"
        raise CapabilityError(
            f"train.enable_fp8_training: no linear layer has rows in multiples of {MULTIPLE} and "
            f"columns in multiples of {_unit(fp8)}, or {why}.\n"
            "  Leave enable_fp8_training out."
        )
    _require_whole_parts(train, names, layers)
    experts = names.config.experts
    num_experts = experts.num_experts if experts else 0
    return Float8Layers(layers.chosen, layers.uneven, tuple(excluded), num_experts)


def require_float8(capability: tuple[int, int] | None) -> None:
    """Raise CapabilityError for a GPU without FP8. None: unknown, or a CPU, which emulates it."""
    if capability is not None and capability < CAPABILITY:
        has, wants = (".".join(map(str, version)) for version in (capability, CAPABILITY))
        raise CapabilityError(
            "train.enable_fp8_training is true, and this machine's GPUs have no numbers of 8 bits: "
            f"their compute capability is {has}, and {wants} (Ada, Hopper) is the first with them."
            "\n  Leave enable_fp8_training out."
        )


def is_shared(native: str) -> bool:
    """Whether a layer is in shared experts, of which tensor-parallel ranks compute all features
    for some of the tokens."""
    return ".mlp.shared_" in native


def _unit(fp8: Fp8Config) -> int:
    return fp8.hadamard_block_size if fp8.hadamard else MULTIPLE


def _require_whole_parts(train: TrainConfig, names: WeightMap, layers: Float8Layers) -> None:
    """Reject splits of a dimension that shares a scale or a Hadamard block."""
    size, fp8 = train.tensor_parallel_size, train.fp8
    if size == 1:
        return
    for native, role in layers.chosen.items():
        if is_shared(native):
            continue
        multiple = _unit(fp8) if role is ParallelStyle.ROWWISE else MULTIPLE
        if fp8.recipe == "blockwise":
            multiple = TILE
        for part in names.hf_names(f"{native}.weight"):
            features = names.hf_shapes()[part][role is ParallelStyle.ROWWISE]
            layer = part.removesuffix(".weight").rpartition(".")[2]
            grain = names.layer_config(part).head_dim if layer in ("k_proj", "v_proj") else 1
            # Key heads are replicated if there are fewer than ranks.
            local_features = max(features / size, grain)
            if local_features % multiple:
                raise CapabilityError(
                    f"train.tensor_parallel_size {size} leaves {local_features:g} of {features} "
                    f"features of {part.removesuffix('.weight')} on a rank, and train.fp8 needs "
                    f"multiples of {multiple}.\n"
                    f"  Write a smaller tensor_parallel_size, or add {layer} to {FIELD}."
                )
