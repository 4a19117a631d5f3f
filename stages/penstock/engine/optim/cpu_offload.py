"""Optimizer CPU offload: the optimizer steps CPU copies of the weights (Ren et al. 2021,
"ZeRO-Offload").

A step copies gradients and weights to the host, and the updated weights back. Results are the same
as without offload.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from penstock.engine.device import uses_cuda
from penstock.engine.distributed.param_shards import LocalParam, local
from penstock.engine.step_part import StepPart, StepState


@dataclass(frozen=True)
class CPUOffloadedParams(StepPart):
    """Trainable parameters, and for each the CPU copy that the optimizer steps."""

    device_params: Sequence[LocalParam]
    host_params: Sequence[LocalParam]

    @classmethod
    def of(cls, params: Sequence[LocalParam]) -> "CPUOffloadedParams":
        """Create CPU copies of the local shards of the trainable parameters of `params`."""
        trainable = [param for param in params if param.parameter.requires_grad]
        host_params: list[LocalParam] = []
        for param in trainable:
            copy = nn.Parameter(_empty_like(local(param.parameter.detach())))
            # Else a gradient of another dtype could not be assigned (torch 2.13).
            copy.grad_dtype = param.parameter.grad_dtype
            host_params.append(replace(param, parameter=copy))
        return cls(trainable, host_params)

    @torch.no_grad()
    def before_update(self, step: StepState) -> None:
        del step
        for param, host_param in zip(self.device_params, self.host_params, strict=True):
            copy, gradient = host_param.parameter, param.parameter.grad
            # Weights too: a checkpoint or adapter merge may have changed them since the last step.
            copy.copy_(local(param.parameter), non_blocking=True)
            if gradient is None:
                copy.grad = None
                continue
            if copy.grad is None:
                copy.grad = _empty_like(local(gradient))
            copy.grad.copy_(local(gradient), non_blocking=True)
        # The optimizer steps on the host, which does not wait for copies by itself.
        if uses_cuda():
            torch.cuda.synchronize()

    @torch.no_grad()
    def after_update(self, step: StepState) -> None:
        del step
        for param, copy in zip(self.device_params, self.host_params, strict=True):
            # The host writes to the copy again after the next `before_update` has synchronized.
            local(param.parameter).copy_(copy.parameter, non_blocking=True)


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    # Copies to and from memory that is not pinned are not asynchronous.
    return torch.empty_like(tensor, device="cpu", pin_memory=uses_cuda())
