"""Labels of a micro-batch, and the positions that have one."""

from dataclasses import dataclass, replace

import torch

from penstock_kernels.to_device import to_device

# Label of positions that are not trained.
IGNORED = -100


@dataclass(frozen=True, eq=False)
class Labels:
    """Labels on the device with their trained positions."""

    values: torch.Tensor
    """[T], or [T, K] for several labels of a position; IGNORED where there is none."""
    trained: torch.Tensor
    """int64 [S]: the positions with at least one label."""
    weights: torch.Tensor | None = None
    """fp32 [T]: loss weight of each label, divided by `weight_scale`, so that the largest is 1;
    None: 1."""
    weight_scale: float = 1.0

    @classmethod
    def of(cls, labels: "torch.Tensor | Labels") -> "Labels":
        """The labels in a tensor. On CUDA this is a host sync: the number of positions is read."""
        if isinstance(labels, Labels):
            return labels
        return cls(labels, _trained_positions(labels))

    @classmethod
    def from_host(
        cls, labels: torch.Tensor, device: torch.device, weights: torch.Tensor | None = None
    ) -> "Labels":
        """Copy host labels, and the loss weights [T] of their positions, to the device; trained
        positions are found on the host, without a sync."""
        trained = _trained_positions(labels)
        on_device = cls(to_device(labels, device), to_device(trained, device))
        if weights is None or not len(trained):
            return on_device
        # Logit gradients may be fp16, which has no numbers above 65,504.
        smallest, scale = (limit.item() for limit in weights[trained].aminmax())
        if smallest == scale:
            return replace(on_device, weight_scale=scale)
        return replace(on_device, weights=to_device(weights / scale, device), weight_scale=scale)


def _trained_positions(labels: torch.Tensor) -> torch.Tensor:
    is_label = labels != IGNORED
    # nonzero() reads its number of results from the device: on a host tensor nothing waits.
    return (is_label.any(1) if labels.dim() > 1 else is_label).nonzero().squeeze(1)
