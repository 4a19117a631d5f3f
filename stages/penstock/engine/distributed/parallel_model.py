"""A model laid out over ranks: its parts here, and how a step runs through them."""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from penstock.core.process.rank_heartbeat import Heartbeat
from penstock.engine.distributed.context_parallel import ContextParallel
from penstock.engine.distributed.data_parallel import GradSync
from penstock.engine.distributed.device_mesh import Mesh
from penstock.engine.distributed.param_shards import LocalParam
from penstock.engine.distributed.tensor_parallel import reduce_partial_grads
from penstock.models.decoder import Decoder, Reduce
from penstock.models.layers.dropout import DropoutRNG, dropout_rng
from penstock.models.layers.router_observer import RouterObserver, observe_routers
from penstock.rows.collate import MicroBatch
from penstock_kernels.attention import VarlenMetadata

Casting = Callable[[], AbstractContextManager[object]]
"""What is entered around a forward pass, to compute it in another precision."""


@dataclass(frozen=True)
class ModelInputs:
    """The tensors are on the device, and hold this rank's tokens alone."""

    input_ids_T: torch.Tensor  # noqa: N815 - T names the dimension
    position_ids_T: torch.Tensor  # noqa: N815 - T names the dimension
    segments: VarlenMetadata
    """What attention needs to know of the documents, in the words of this rank's own attention."""
    reduce: Reduce
    """Hidden states and head to the summed loss of this rank's tokens."""
    noise: DropoutRNG | None = None
    """What the model draws from; None: it drops nothing."""
    watch: RouterObserver | None = None
    """Who looks on while routers choose."""


if TYPE_CHECKING:
    # Imported by whoever makes one: it takes a second.
    from penstock.engine.distributed.pipeline_parallel import Pipeline


@dataclass(frozen=True)
class ParallelModel:
    """What this rank holds of the model, and whom it computes with."""

    mesh: Mesh
    parts: Sequence[Decoder]
    """One, or with several stages of a pipeline on a rank, one of each."""
    held: Sequence[LocalParam]
    """Every parameter of the parts."""
    context: ContextParallel
    sync: GradSync
    pipeline: "Pipeline | None"
    """None where the only part is the whole model."""
    casting: Casting
    """Entered around forward passes: casts, where the weights are not cast themselves."""
    pulse: Heartbeat = field(default_factory=Heartbeat, compare=False)
    """Hears which pass begins, where gradients are computed. What sums them is of the backward
    ones."""

    @property
    def trainable(self) -> list[LocalParam]:
        """What gradients are wanted of."""
        return [held for held in self.held if held.parameter.requires_grad]

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that compute the same rows together."""
        return self.mesh.degrees.world // self.mesh.degrees.num_replicas

    @property
    def tells(self) -> bool:
        """Whether this rank speaks for those that compute the same rows, of which each stage of a
        pipeline has one."""
        return self.mesh.index("tensor", "ring", "ulysses") == 0

    def call(
        self,
        batch: MicroBatch,
        reduce: Reduce,
        device: torch.device,
        noise: DropoutRNG | None = None,
    ) -> ModelInputs:
        """What the model is called with for this rank's tokens of a micro-batch."""
        mine = self.context.mine(batch)
        return ModelInputs(
            mine.input_ids_T.to(device, non_blocking=True),
            mine.position_ids_T.to(device, non_blocking=True),
            self.context.segments(batch, device),
            reduce,
            noise,
        )

    def forward_backward(self, calls: Sequence[ModelInputs]) -> torch.Tensor:
        """Leave the gradients of all ranks' calls, summed, in the parameters.

        Returns this rank's share of the sum of what the calls reduce to, a scalar in fp32.
        """
        if self.pipeline:
            self.sync.before(last=True)
            total = self.pipeline.forward_backward(calls)
            self.pulse.begins("backward")
        else:
            total = self._one_by_one(calls)
        self.sync.finish()
        reduce_partial_grads(self.trainable, self.mesh)
        if self.pipeline:
            self.pipeline.sum_tied()
        return self._share(total)

    def forward(self, calls: Sequence[ModelInputs]) -> torch.Tensor:
        """The same without gradients, in fp64."""
        with self.at_rest():
            if self.pipeline:
                total = self.pipeline.forward(calls).double()
            else:
                total = torch.stack([self._reduced(call).double() for call in calls]).sum()
        return self._share(total)

    @contextmanager
    def at_rest(self) -> Generator[None]:
        """While this is entered nothing is dropped, and nothing random is drawn."""
        for part in self.parts:
            part.eval()
        try:
            yield
        finally:
            for part in self.parts:
                part.train()

    @torch.no_grad()
    def look(self, call: ModelInputs) -> None:
        """Pass forward as the model is, at rest or not, for what `reduce` itself takes down."""
        if self.pipeline:
            self.pipeline.forward([call])
        else:
            self._reduced(call)

    @torch.no_grad()
    def observe(self, calls: Sequence[ModelInputs]) -> None:
        """Pass forward as in training, for those who look on, and compute no loss."""
        calls = [replace(call, reduce=_nothing) for call in calls]
        if self.pipeline:
            self.pipeline.forward(calls)
        else:
            for call in calls:
                self._reduced(call)

    def _one_by_one(self, calls: Sequence[ModelInputs]) -> torch.Tensor:
        total = torch.zeros((), device=calls[0].input_ids_T.device)
        for index, call in enumerate(calls):
            self.sync.before(last=index == len(calls) - 1)
            self.pulse.begins("forward")
            loss = self._reduced(call)
            self.pulse.begins("backward")
            loss.backward()
            total += loss.detach()
        return total

    def _reduced(self, call: ModelInputs) -> torch.Tensor:
        [model] = self.parts
        with self.casting(), dropout_rng(call.noise), observe_routers(call.watch):
            return model(call.input_ids_T, call.position_ids_T, call.segments, call.reduce)

    def _share(self, total: torch.Tensor) -> torch.Tensor:
        # Ranks along the tensor axis come to the same sum; one of them tells it.
        return total if self.mesh.index("tensor") == 0 else torch.zeros_like(total)


def _nothing(hidden_TD: torch.Tensor, _: nn.Module) -> torch.Tensor:
    return hidden_TD.new_zeros(())
