"""Optimizer-in-backward: step each parameter when its gradient is ready, then free the gradient.

So gradients of the whole model are never in memory at once (Lv et al. 2024, "LOMO"). Features that
need all gradients before the first update, such as clipping, are rejected when the config is read.
"""

from collections.abc import Callable, Sequence

import torch

from penstock.core.errors import StageError
from penstock.engine.checkpoint.async_staging import PreUpdateHooks
from penstock.engine.distributed.param_shards import LocalParam, local
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.step_part import StepPart, StepState


class OptimizerInBackward(StepPart):
    """Steps each parameter when its gradient is complete; the norm is known only afterwards."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: Sequence[LocalParam],
        ranks: ProcessInfo,
        changes: PreUpdateHooks,
    ) -> None:
        """`params` are trainable, and the number of copies of each is the same on every rank."""
        self._optimizer, self._ranks, self._changes = optimizer, ranks, changes
        self._squares: list[torch.Tensor] = []
        for param in params:
            # FSDP2 calls these hooks too, after its reduce-scatter (`foreach_reduce`, torch 2.13).
            param.parameter.register_post_accumulate_grad_hook(self._on_gradient(param))

    def norm(self) -> torch.Tensor:
        """The gradient norm of the last backward pass, fp32 scalar. Collective, once per pass."""
        total = torch.zeros((), dtype=torch.float64, device=self._ranks.device)
        for square in self._squares:
            total += square.to(total.device)
        self._squares = []
        return self._ranks.all_reduce_sum(total).sqrt().float()

    def skips_update(self, step: StepState) -> bool:
        """Raises StageError: the weights are not those of the step before."""
        raise StageError(
            f"the gradient norm of step {step.number + 1} is {step.grad_norm}, and with "
            "train.fuse_optimizer_step the weights were already updated with it.\n"
            "  Lower train.lr and resume from the last checkpoint, which is intact; without "
            "fuse_optimizer_step the rows that cause it are found."
        )

    def _on_gradient(self, local_param: LocalParam) -> Callable[[torch.Tensor], None]:
        copies = local_param.num_copies
        assert copies is not None, f"{local_param.name} lies otherwise from piece to piece"

        @torch.no_grad()
        def hook(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            gradient = local(parameter.grad)
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
            self._squares.append(norm.double().square() / copies)
            self._changes.run()
            # No other parameter has a gradient now, so the step updates only this one.
            self._optimizer.step()
            parameter.grad = None

        return hook
