"""Ranks that compute the same packed rows divide their images: each calls the vision part for a
share of them, and all gather the features. F image features, D their width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F

from penstock.engine.distributed.collectives import Residual, copy_to_tp_region
from penstock.engine.distributed.device_mesh import Mesh


@dataclass(frozen=True)
class ImageShares:
    """The ranks of a tensor- and context-parallel group, from the view of one."""

    group: dist.ProcessGroup
    size: int
    index: int
    gradient_copies: int
    """Ranks that each have the whole gradient of a feature: those along the tensor axis, if the
    residual stream is whole."""

    @classmethod
    def of(cls, mesh: Mesh, residual: Residual) -> "ImageShares | None":
        """None for a rank that computes its rows alone. Collective."""
        axes = "tensor", "ring", "ulysses"
        group = mesh.group(*axes)
        if group is None:
            return None
        copies = mesh.size("tensor") if residual == "whole" else 1
        return cls(group, mesh.size(*axes), mesh.index(*axes), copies)

    def divide(self, counts: Sequence[int]) -> list[range]:
        """The consecutive images of each rank, of images with so many features: each image is of
        the rank in whose part of all features its middle is."""
        ends = [*accumulate(counts)]
        middles = (2 * end - count for end, count in zip(ends, counts, strict=True))
        ranks = [middle * self.size // (2 * ends[-1]) for middle in middles]
        starts = [sum(rank < rank_end for rank in ranks) for rank_end in range(self.size + 1)]
        return [range(start, end) for start, end in pairwise(starts)]

    def gather(self, tensors: Sequence[torch.Tensor], counts: Sequence[int]) -> list[torch.Tensor]:
        """The features of all ranks, `counts[i]` of rank i, of each kind [F, D]; `tensors` may have
        more than are this rank's, of a blank image."""
        most = max(counts)
        # All kinds side by side, for one collective; it needs equal sizes, hence the padding.
        mine_FD = torch.cat([*tensors], dim=-1)[: counts[self.index]]
        padded_MD = F.pad(mine_FD, (0, 0, 0, most - len(mine_FD)))
        all_GD = copy_to_tp_region(padded_MD, self.group, "split")
        if all_GD.requires_grad and self.gradient_copies > 1:
            # The reduction adds the whole gradient of each of these ranks.
            all_GD.register_hook(lambda gradient_GD: gradient_GD / self.gradient_copies)
        parts = (part[:count] for part, count in zip(all_GD.split(most), counts, strict=True))
        return [*torch.cat([*parts]).split([tensor.shape[-1] for tensor in tensors], dim=-1)]
