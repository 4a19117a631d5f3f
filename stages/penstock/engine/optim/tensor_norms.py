"""Norms of checkpoint tensors, however ranks shard, fuse and stack them."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from penstock.engine.distributed.param_shards import LocalParam, TensorShard
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.optim.novograd import Tensors, squared


def numbers_of(piece: TensorShard) -> range:
    """The indices of a stack's tensors that a shard has parts of; only 0 without a stack."""
    is_stack = len(piece.full_shape) == 3
    first, count = (piece.offsets[0], piece.sizes[0]) if is_stack else (0, 1)
    return range(first, first + count)


class TensorNorms(Tensors):
    """Per-tensor norms of `params`, with each matrix of a stack separate.

    Every rank creates it and calls it at the same time; one all-reduce gives all norms.
    """

    def __init__(self, params: Sequence[LocalParam], ranks: ProcessInfo) -> None:
        self._ranks = ranks
        self._pieces = {one.parameter: one.shards for one in params}
        here = {(piece.tensor, piece.full_shape) for one in params for piece in one.shards}
        everywhere = sorted({one for found in ranks.all_gather(sorted(here)) for one in found})
        firsts: dict[str, int] = {}
        self._count = 0
        for tensor, whole in everywhere:
            firsts[tensor] = self._count
            self._count += whole[0] if len(whole) == 3 else 1
        self._places: dict[nn.Parameter, torch.Tensor] = {}
        self._shares: dict[nn.Parameter, torch.Tensor] = {}
        for one in params:
            own = [(piece, number) for piece in one.shards for number in numbers_of(piece)]
            places = [firsts[piece.tensor] + number for piece, number in own]
            # Each element is summed by as many ranks as hold it.
            shares = [1 / (one.num_replicas * piece.num_copies) for piece, _ in own]
            self._places[one.parameter] = torch.tensor(
                places, dtype=torch.int64, device=ranks.device
            )
            self._shares[one.parameter] = torch.tensor(
                shares, dtype=torch.float64, device=ranks.device
            )

    def parts(self, parameter: nn.Parameter, here: torch.Tensor) -> list[torch.Tensor]:
        """One part for each shard."""
        return list(self._parts(parameter, here))

    def _parts(self, parameter: nn.Parameter, here: torch.Tensor) -> Iterator[torch.Tensor]:
        for piece in self._pieces[parameter]:
            yield piece.view(here).view(len(numbers_of(piece)), -1)

    def square_norms(
        self, gradients: Mapping[nn.Parameter, torch.Tensor]
    ) -> Mapping[nn.Parameter, torch.Tensor]:
        """The squared norm of each full tensor, over all ranks."""
        device = self._ranks.device
        sums = torch.zeros(self._count, dtype=torch.float64, device=device)
        for parameter, gradient in gradients.items():
            if parts := self.parts(parameter, gradient):
                own = squared(parts).to(device) * self._shares[parameter]
                sums.index_add_(0, self._places[parameter], own)
        sums = self._ranks.all_reduce_sum(sums)
        return {
            parameter: sums[self._places[parameter]].float().to(gradient.device)
            for parameter, gradient in gradients.items()
        }
