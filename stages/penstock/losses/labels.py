"""Labels of a micro-batch, and the positions that have one."""

from dataclasses import dataclass

import torch

from penstock_kernels.to_device import to_device

IGNORED = -100
"""Label of positions that are not trained."""


@dataclass(frozen=True, eq=False)
class Labels:
    """Labels on the device with their trained positions."""

    values: torch.Tensor
    """[T], or [T, K] for several labels of a position; IGNORED where there is none."""
    trained: torch.Tensor
    """int64 [S]: the positions with at least one label."""

    @classmethod
    def of(cls, labels: "torch.Tensor | Labels") -> "Labels":
        """The labels in a tensor. On CUDA this is a host sync: the number of positions is read."""
        if isinstance(labels, Labels):
            return labels
        return cls(labels, _trained_positions(labels))

    @classmethod
    def from_host(cls, labels: torch.Tensor, device: torch.device) -> "Labels":
        """Copy host labels to the device; their positions are found on the host, without a sync."""
        return cls(to_device(labels, device), to_device(_trained_positions(labels), device))


def _trained_positions(labels: torch.Tensor) -> torch.Tensor:
    is_label = labels != IGNORED
    return (is_label.any(1) if labels.dim() > 1 else is_label).nonzero().squeeze(1)
