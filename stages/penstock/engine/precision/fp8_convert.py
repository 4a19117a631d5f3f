"""FP8 training: convert linear layers to float8, and set the groups for amax reduction.

Scales cover full matrices, so a layout does not change them: all tokens of a micro-batch, over
context-parallel ranks, and all features. If values on several ranks share a scale, amax is
all-reduced before quantization.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from penstock.adapters.lora import LoraLinear
from penstock.config.schema.train import TrainConfig
from penstock.engine.distributed.device_mesh import Axis, Mesh
from penstock.engine.precision.fp8_layers import Float8Layers, float8_layers, is_shared
from penstock.models.causal_lm import CausalLM
from penstock.models.layers.float8 import Float8Linear, Float8Matmul
from penstock.models.tp_roles import ParallelStyle, Roles
from penstock.models.weights import WeightMap
from penstock_kernels.float8 import Agree, AmaxReduceGroups, Float8Recipe

OF_TOKENS: tuple[Axis, ...] = ("ring", "ulysses")
"""Context-parallel axes, whose ranks share the tokens of a packed sequence."""


def convert_to_float8_training(
    parts: Sequence[CausalLM],
    train: TrainConfig,
    names: WeightMap,
    roles: Roles,
    notify: Callable[[str], None],
) -> Float8Layers:
    """Convert the layers of a model's parts to float8, in place; the choice is logged.

    Call it after adapters are injected: LoRA factors keep their precision. Raises ConfigError and
    CapabilityError as `float8_layers`.
    """
    if not train.enable_fp8_training:
        return Float8Layers()
    fp8, layers = train.fp8, float8_layers(train, names, roles)
    notify(layers.description(fp8))
    scheme = Float8Recipe(
        recipe=fp8.recipe,
        gradients=fp8.of_gradients,
        input_gradient="quantized" if fp8.quantize_input_grad else "exact",
        weight_gradient="quantized" if fp8.quantize_weight_grad else "exact",
        block=fp8.hadamard_block_size if fp8.hadamard else None,
    )
    for part in parts:
        modules = dict(part.named_modules())
        for native in layers.chosen:
            module = modules.get(native)
            if isinstance(module, LoraLinear):
                module.affine = Float8Matmul(scheme)
            elif isinstance(module, nn.Linear):
                part.set_submodule(native, Float8Linear(module, Float8Matmul(scheme)))
    return layers


def products_in(model: CausalLM) -> Mapping[str, Float8Matmul]:
    """The FP8 matmuls of a model's layers, by module name."""
    return {
        name: module.affine
        for name, module in model.named_modules()
        if isinstance(module, Float8Linear | LoraLinear) and isinstance(module.affine, Float8Matmul)
    }


def set_amax_reduce_groups(parts: Sequence[CausalLM], layers: Float8Layers, mesh: Mesh) -> None:
    """Set the groups for amax reduction on layers that `convert_to_float8_training` has converted;
    in place. Call it on every rank."""
    if not layers.chosen:
        return
    tokens, features = _largest(mesh, *OF_TOKENS), _largest(mesh, "tensor")
    shared = _largest(mesh, *OF_TOKENS, "tensor")
    for name, product in (item for part in parts for item in products_in(part).items()):
        if is_shared(name):
            product.agreement = AmaxReduceGroups(tokens=shared)
        elif layers.chosen[name] is ParallelStyle.COLWISE:
            product.agreement = AmaxReduceGroups(tokens=tokens, outputs=features)
        else:
            product.agreement = AmaxReduceGroups(tokens=tokens, inputs=features)


def _largest(mesh: Mesh, *axes: Axis) -> Agree | None:
    group = mesh.group(*axes)
    return group and partial(largest_over, group)


def largest_over(group: dist.ProcessGroup, largest: torch.Tensor) -> torch.Tensor:
    """All-reduce the elementwise maximum over a group. NaN becomes infinity."""
    # The MAX of some backends drops NaN, and none drops infinity.
    amax = torch.where(largest.isnan(), torch.inf, largest)
    dist.all_reduce(amax, dist.ReduceOp.MAX, group)
    return amax
