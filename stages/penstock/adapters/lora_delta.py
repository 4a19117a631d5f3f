"""The LoRA deltas of a model's weights, for merging.

E experts. Weights are in the modules' layout. Those of experts count as one matrix: the rows of
each expert, one expert after another.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from penstock.adapters.lora import LoraLinear
from penstock.adapters.lora_embedding import PART, LoraEmbedding
from penstock.adapters.lora_experts import ExpertAdapter
from penstock.adapters.lora_stacked import StackedAdapter
from penstock.adapters.names import ADAPTER
from penstock.adapters.weight_delta import LoraDelta
from penstock.models.layers.experts import Experts, Matrix, Stack
from penstock.models.layers.quantized_linear import QuantizedMatrix

GatherFn = Callable[[torch.Tensor], torch.Tensor]
"""Returns the full tensor of a LoRA parameter that may be sharded by rows. It is called for all
parameters in the same order on every rank, so it may be a collective."""


@dataclass(frozen=True)
class LoraWeight:
    """A weight that has adapters, and their current deltas."""

    weight: torch.Tensor | QuantizedMatrix
    products: Sequence[tuple[int, LoraDelta]]
    """(first row of the weight, delta to add from there)."""


def iter_adapted_weights(model: nn.Module, gather: GatherFn) -> Iterator[LoraWeight]:
    """The adapted weights, in the model's order. DoRA magnitudes are not included."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            products: list[tuple[int, LoraDelta]] = []
            for part, a in module.lora_A.items():
                delta = LoraDelta(gather(module.lora_B[part]), gather(a), module.scale)
                products.append((module.first_row(part), delta))
            yield LoraWeight(module.weight, products)
        elif isinstance(module, LoraEmbedding):
            a, b = gather(module.lora_A[PART]), gather(module.lora_B[PART])
            yield LoraWeight(module.weight, [(0, LoraDelta(a.T, b.T, module.scale))])
        elif isinstance(module, Experts) and isinstance(module.adapter, ExpertAdapter):
            for stack in module.stacks:
                if products := _expert_deltas(module, module.adapter, stack, gather):
                    yield LoraWeight(getattr(module, stack), products)
        elif isinstance(module, StackedAdapter):
            experts = model.get_submodule(name.removesuffix(f".{ADAPTER}"))
            for matrix in module.lora_A:
                b_ENr, a_ErK = gather(module.lora_B[matrix]), gather(module.lora_A[matrix])
                products = []
                for expert, (b, a) in enumerate(zip(b_ENr, a_ErK, strict=True)):
                    product = LoraDelta(b, a, module.scale)
                    product = product.transpose() if module.is_transposed else product
                    products.append((expert * product.shape[0], product))
                yield LoraWeight(experts.get_parameter(matrix), products)


def _expert_deltas(
    experts: Experts, adapter: ExpertAdapter, name: Stack, gather: GatherFn
) -> list[tuple[int, LoraDelta]]:
    is_quantized = isinstance(getattr(experts, name), QuantizedMatrix)
    is_transposed = experts.is_transposed and not is_quantized
    within: list[Matrix] = [
        matrix for matrix in experts.matrices if (matrix == "down_proj") is (name == "down_proj")
    ]
    heights = [experts.matrices[matrix][is_transposed] for matrix in within]
    deltas: list[tuple[int, LoraDelta]] = []
    for number, matrix in enumerate(within):
        a, b = adapter.factor("lora_A", matrix), adapter.factor("lora_B", matrix)
        if a is None or b is None:
            continue
        # Experts may share one.
        a_ErK, b_ENr = (
            factor.expand(experts.num_experts, *factor.shape[-2:]) for factor in map(gather, (a, b))
        )
        for expert in range(experts.num_experts):
            product = LoraDelta(b_ENr[expert], a_ErK[expert], adapter.scale)
            start = expert * sum(heights) + sum(heights[:number])
            deltas.append((start, product.transpose() if is_transposed else product))
    return deltas
