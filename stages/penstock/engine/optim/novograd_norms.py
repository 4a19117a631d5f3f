"""Norms of checkpoint tensors, however ranks shard, fuse and stack them."""

from collections.abc import Mapping, Sequence

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
    """Per-tensor norms of `params`, with each matrix of a stack separate. Every rank creates it and
    calls it at the same time; one all-reduce gives all norms."""

    def __init__(self, params: Sequence[LocalParam], ranks: ProcessInfo) -> None:
        self._ranks = ranks
        self._pieces = {param.parameter: param.shards for param in params}
        local_tensors = {
            (piece.tensor, piece.full_shape) for param in params for piece in param.shards
        }
        # Sorted: the places of tensors in the all-reduced sums must be the same on all ranks.
        everywhere = sorted(local_tensors.union(*ranks.all_gather(sorted(local_tensors))))
        firsts: dict[str, int] = {}
        self._count = 0
        for tensor, shape in everywhere:
            firsts[tensor] = self._count
            self._count += shape[0] if len(shape) == 3 else 1
        self._places: dict[nn.Parameter, torch.Tensor] = {}
        self._shares: dict[nn.Parameter, torch.Tensor] = {}
        for param in params:
            own = [(piece, number) for piece in param.shards for number in numbers_of(piece)]
            slots = [firsts[piece.tensor] + number for piece, number in own]
            # Each element is summed by as many ranks as hold it.
            shares = [1 / (param.num_replicas * piece.num_copies) for piece, _ in own]
            slots_N = torch.tensor(slots, dtype=torch.int64, device=ranks.device)
            shares_N = torch.tensor(shares, dtype=torch.float64, device=ranks.device)
            self._places[param.parameter], self._shares[param.parameter] = slots_N, shares_N

    def parts(self, parameter: nn.Parameter, tensor: torch.Tensor) -> list[torch.Tensor]:
        pieces = self._pieces[parameter]
        return [piece.view(tensor).view(len(numbers_of(piece)), -1) for piece in pieces]

    def square_norms(
        self, gradients: Mapping[nn.Parameter, torch.Tensor]
    ) -> Mapping[nn.Parameter, torch.Tensor]:
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
