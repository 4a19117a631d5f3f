"""The optimizer in the host's memory: its states lie there and it steps there, on copies of the
weights (Ren et al. 2021, "ZeRO-Offload").

A step brings gradients and weights to the host, and what became of the weights back. What is
computed is what would be computed without it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from penstock.engine.distributed.param_shards import LocalParam, local

HOST = torch.device("cpu")


@dataclass(frozen=True)
class CPUOffloadedParams:
    """Trained parameters, and for each the one that the optimizer steps."""

    here: Sequence[LocalParam]
    there: Sequence[LocalParam]

    @classmethod
    def of(cls, held: Sequence[LocalParam]) -> "CPUOffloadedParams":
        """Copies of what is trained of `held`: of each parameter the part that is here."""
        here = [one for one in held if one.parameter.requires_grad]
        return cls(here, [replace(one, parameter=_copy(one.parameter)) for one in here])

    @torch.no_grad()
    def bring(self) -> None:
        """Bring weights and gradients to the copies."""
        for one, other in zip(self.here, self.there, strict=True):
            copy, gradient = other.parameter, one.parameter.grad
            # Also what a checkpoint, or merging, has changed since the last step.
            copy.copy_(local(one.parameter), non_blocking=True)
            if gradient is None:
                copy.grad = None
                continue
            if copy.grad is None:
                copy.grad = _like(local(gradient))
            copy.grad.copy_(local(gradient), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    @torch.no_grad()
    def take_back(self) -> None:
        """Take the copies' weights back."""
        for one, other in zip(self.here, self.there, strict=True):
            local(one.parameter).copy_(other.parameter, non_blocking=True)


def _copy(parameter: nn.Parameter) -> nn.Parameter:
    copy = nn.Parameter(_like(local(parameter.detach())))
    copy.grad_dtype = parameter.grad_dtype
    return copy


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device=HOST, pin_memory=torch.cuda.is_available())
