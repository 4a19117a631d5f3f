"""The matrices A and B of linear layers in the dtype in which these compute.

Layers that share an input have one matrix with the rows of all their A, so that `x A^T` is one
product. Copies are made when parameters have changed, which is once a step: not in each
micro-batch, recomputation and backward pass.

K features of the input, N of a part's output, r the rank, R the sum of the ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from penstock.adapters.lora import LoraLinear

Layers = tuple["LoraLinear", ...]


@dataclass(frozen=True)
class Factors:
    """The matrices of some layers."""

    a_RK: torch.Tensor  # noqa: N815 - RK names the dimensions
    """The A of all their parts."""
    b_Nr: Sequence[torch.Tensor]  # noqa: N815 - Nr names the dimensions
    """B of each part."""


def parameters_of(layers: Layers) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A and B of each adapted part of the layers, in their order."""
    return (
        [a for layer in layers for a in layer.lora_A.values()],
        [b for layer in layers for b in layer.lora_B.values()],
    )


def cast_factors(layers: Layers, dtype: torch.dtype) -> Factors:
    """The matrices in `dtype`: the parameters themselves where they are in it."""
    a_rK, b_Nr = parameters_of(layers)
    a_RK = a_rK[0] if len(a_rK) == 1 else torch.cat(a_rK)
    return Factors(a_RK.detach().to(dtype), [b.detach().to(dtype) for b in b_Nr])


@dataclass
class _Copies:
    """Copies of the matrices of some layers, and the parameters' state when they were made."""

    factors: Factors
    targets: Sequence[torch.Tensor]
    """Their memory, by parameter."""
    state: tuple[tuple[int, int], ...] = ()


@dataclass
class FactorCopies:
    """Copies for the layers of a model whose parameters are whole in memory (without FSDP).

    That a parameter was written is seen by its version, which operators raise that write to it or
    to a view of it. Fused optimizer steps and kernels do not: whoever calls one does it
    (`torch.autograd.graph.increment_version`).
    """

    _copies: dict[tuple[Layers, torch.dtype], _Copies] = field(default_factory=dict)

    def get(self, layers: Layers, dtype: torch.dtype) -> Factors:
        """The matrices of these layers in `dtype`, as the parameters are now."""
        a_rK, b_Nr = parameters_of(layers)
        if len(a_rK) == 1 and a_rK[0].dtype == b_Nr[0].dtype == dtype:
            return cast_factors(layers, dtype)
        copies = self._copies.get((layers, dtype))
        if copies is None:
            copies = self._copies[layers, dtype] = _allocate(a_rK, b_Nr, dtype)
        if copies.state != _state([*a_rK, *b_Nr]):
            self._update()
        return copies.factors

    @torch.no_grad()
    def _update(self) -> None:
        # All that are outdated, not those of the layers that ask alone: one launch after an update.
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for (layers, _), copies in self._copies.items():
            a_rK, b_Nr = parameters_of(layers)
            state = _state([*a_rK, *b_Nr])
            if copies.state != state:
                copies.state = state
                targets += copies.targets
                sources += [*a_rK, *b_Nr]
        torch._foreach_copy_(targets, sources)


def _allocate(
    a_rK: Sequence[torch.Tensor], b_Nr: Sequence[torch.Tensor], dtype: torch.dtype
) -> _Copies:
    ranks = [len(a) for a in a_rK]
    a_RK = a_rK[0].new_empty(sum(ranks), a_rK[0].shape[1], dtype=dtype)
    copies_Nr = [b.new_empty(b.shape, dtype=dtype) for b in b_Nr]
    return _Copies(Factors(a_RK, copies_Nr), [*a_RK.split(ranks), *copies_Nr])


def _state(parameters: Sequence[torch.Tensor]) -> tuple[tuple[int, int], ...]:
    # Not the data pointer, which is 0 for every fake tensor of a dry run.
    return tuple((p._version, p.untyped_storage()._cdata) for p in parameters)
