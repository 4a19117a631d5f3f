"""Pipeline parallelism: each rank runs some stages; only hidden states pass between ranks.

All ranks of a pipeline load the same batches, so a stage already has everything else that it needs
of a micro-batch. T tokens of a micro-batch on this rank, D model width.
"""

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    get_schedule_class,
)

from penstock.config.schema.train import TrainConfig
from penstock.core.process.rank_heartbeat import Heartbeat
from penstock.engine.distributed.device_mesh import Mesh
from penstock.engine.distributed.parallel_model import AutocastContext, ModelInputs
from penstock.engine.distributed.param_shards import local
from penstock.engine.distributed.pipeline_stages import stages_of_rank, virtual_stages
from penstock.models.causal_lm import CausalLM

# On an error torch logs the whole schedule, a hundred lines, above the error itself.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)

BETWEEN_PASSES = "waiting for other stages"


class Pipeline:
    """The stages of one rank, and the schedule that runs micro-batches through them."""

    def __init__(
        self,
        parts: Sequence[CausalLM],
        mesh: Mesh,
        train: TrainConfig,
        *,
        device: torch.device,
        residual: Literal["whole", "split"] = "whole",
        autocast: AutocastContext = nullcontext,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        """`parts` are those of `build_stage_modules`, in that order, sharded or not.

        With a `residual` split over the tensor axis, each rank sends its own part of the hidden
        states. `autocast` is entered around each forward pass, and never around a backward pass.
        `heartbeat` reports each pass that computes gradients, and the time between passes.
        """
        self._parts, self._train, self._device = parts, train, device
        self._width = parts[0].config.hidden_size
        self._tp_share = mesh.size("tensor") if residual == "split" else 1
        self._dtype: torch.dtype = getattr(torch, train.computes_in)
        self._autocast, self._heartbeat = autocast, heartbeat or Heartbeat()
        self._stage_indices = stages_of_rank(train, mesh.index("pipeline"))
        self._num_stages = mesh.size("pipeline") * virtual_stages(train)
        ranks = mesh.ranks("pipeline")
        self._rank_by_stage = {
            stage: rank
            for index, rank in enumerate(ranks)
            for stage in stages_of_rank(train, index)
        }
        # A separate group: in a shared one, P2P messages would interleave with collectives in a
        # different order on each rank. Created by its own ranks: otherwise all would have to create
        # that of each pipeline.
        group = dist.new_group(ranks, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        self._key: tuple[int, int] | None = None
        self._stages: list[_Stage] = []
        self._schedule: PipelineScheduleSingle | PipelineScheduleMulti | None = None

    def forward_backward(self, calls: Sequence[ModelInputs]) -> torch.Tensor:
        """Accumulate the gradients of all micro-batches; an FSDP model reduces them at the end.

        All calls must have the same number of tokens. Returns the sum of the last stage's
        `output_fn` results, detached; 0 on ranks without the last stage.
        """
        key = (len(calls), len(calls[0].position_ids_T))
        if self._schedule is None or self._key != key:
            # Keep only the newest: each owns input and output buffers for every micro-batch.
            self._key, self._stages, self._schedule = None, [], None
            self._key, self._schedule = key, self._build_schedule(*key)
        for stage in self._stages:
            stage.calls = calls
        self._heartbeat.set_phase(BETWEEN_PASSES)
        losses: list[torch.Tensor] = []
        # Torch requires a target per micro-batch; `output_fn` has its own labels.
        targets = torch.empty(len(calls), device="meta")
        self._schedule.step(target=targets, losses=losses, return_outputs=False)
        for stage in self._stages:
            stage.calls = ()
        if not losses:
            return torch.zeros((), device=self._device)
        return torch.stack([loss.detach().float() for loss in losses]).sum()

    @torch.no_grad()
    def forward(self, calls: Sequence[ModelInputs]) -> torch.Tensor:
        """The same sum without gradients, under any schedule: stage after stage."""
        total = torch.zeros((), device=self._device)
        sending: list[Any] = []
        # One call after another, so that both ranks of a pair match their messages in the same
        # order.
        for call in calls:
            hidden_TD: torch.Tensor | None = None
            for number, part in zip(self._stage_indices, self._parts, strict=True):
                inputs = call.input_ids_T
                if number - 1 in self._stage_indices:
                    assert hidden_TD is not None
                    inputs = hidden_TD
                elif number:
                    # A stage computes in `computes_in`, so its output has that dtype.
                    shape = self._shape(len(call.position_ids_T))
                    inputs = torch.empty(shape, dtype=self._dtype, device=self._device)
                    dist.recv(inputs, self._rank_by_stage[number - 1], group=self._group)
                with self._autocast(), call.in_context():
                    args = inputs, call.position_ids_T, call.segments, call.output_fn
                    output = part(*args, **call.extra_args)
                if number == self._num_stages - 1:
                    total += output
                elif number + 1 in self._stage_indices:
                    hidden_TD = output
                else:
                    to = self._rank_by_stage[number + 1]
                    output = output.contiguous()
                    # Keep the tensor with its message: memory that is being sent must not be freed.
                    sending.append((dist.isend(output, to, group=self._group), output))
        for message, _ in sending:
            message.wait()
        return total

    def all_reduce_copied_grads(self) -> None:
        """All-reduce the gradients of an embedding that both the first and the last stage have: one
        that is tied to the head, or read by layers that predict further tokens.

        The same optimizer then keeps both copies equal. Called by all ranks, before or after
        gradients are reduced over data-parallel ranks.
        """
        config = self._parts[0].config
        if not (config.tie_word_embeddings or config.num_mtp_layers):
            return
        # A dict: in a stage with both, a tied embedding and the head are one Parameter.
        copies = {
            module.weight: None
            for part in self._parts
            for module in (part.edges[0], part.edges[2] if config.tie_word_embeddings else None)
            if isinstance(module, nn.Embedding | nn.Linear)
        }
        gradients = [local(copy.grad) for copy in copies if copy.grad is not None]
        if len(gradients) == 2:
            # In a V-shaped schedule the first and the last stage are on one rank.
            gradients[0].add_(gradients[1])
            gradients[1].copy_(gradients[0])
        elif gradients:
            # A sum of two terms does not depend on their order, so both ranks get bitwise identical
            # results. Gradients of offloaded weights are in host memory, which no GPU can send.
            local_grad = gradients[0].to(self._device)
            received = torch.empty_like(local_grad)
            last = self._num_stages - 1
            peer = self._rank_by_stage[last if 0 in self._stage_indices else 0]
            messages = [
                dist.P2POp(dist.isend, local_grad, peer, self._group),
                dist.P2POp(dist.irecv, received, peer, self._group),
            ]
            for message in dist.batch_isend_irecv(messages):
                message.wait()
            gradients[0].add_(received.to(gradients[0].device))

    def _shape(self, num_tokens: int) -> tuple[int, int]:
        return num_tokens // self._tp_share, self._width

    def _build_schedule(
        self, num_calls: int, num_tokens: int
    ) -> PipelineScheduleSingle | PipelineScheduleMulti:
        # With given shapes torch does not run the model on dummy data to infer them.
        ids_T = torch.empty(num_tokens, dtype=torch.int64, device="meta")
        hidden_TD = torch.empty(
            self._shape(num_tokens), dtype=self._dtype, device="meta", requires_grad=True
        )
        loss = torch.empty((), device="meta", requires_grad=True)
        last = self._num_stages - 1
        self._stages = [
            _Stage(
                part,
                number,
                self._num_stages,
                self._device,
                input_args=hidden_TD if number else ids_T,
                output_args=loss if number == last else hidden_TD,
                group=self._group,
            )
            for number, part in zip(self._stage_indices, self._parts, strict=True)
        ]
        for stage in self._stages:
            stage.autocast, stage.heartbeat = self._autocast, self._heartbeat
        # Losses are sums already divided by the token count of the step, so do not average them.
        settings: dict[str, Any] = {
            "n_microbatches": num_calls,
            "loss_fn": lambda loss, _target: loss,
            "scale_grads": False,
        }
        kind = get_schedule_class(self._train.pipeline_parallel_schedule)
        if issubclass(kind, PipelineScheduleSingle):
            return kind(self._stages[0], **settings)
        return kind(self._stages, **settings)


class _Stage(PipelineStage):
    """A pipeline stage that takes inputs from its own calls, not from torch's split arguments."""

    calls: Sequence[ModelInputs] = ()
    autocast: AutocastContext = nullcontext
    heartbeat: Heartbeat

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        del args, kwargs
        call = self.calls[fwd_chunk_id]
        with self._report_phase("forward"), call.in_context():
            return super().forward_one_chunk(
                fwd_chunk_id,
                (call.input_ids_T,),
                {
                    "position_ids_T": call.position_ids_T,
                    "segments": call.segments,
                    "output_fn": call.output_fn,
                    **call.extra_args,
                },
                save_forward_output,
            )

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._report_phase("backward"):
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._report_phase("backward"):
            return super().backward_weight_one_chunk(*args, **kwargs)

    @contextmanager
    def _report_phase(self, phase: str) -> Generator[None]:
        self.heartbeat.set_phase(phase)
        yield
        self.heartbeat.set_phase(BETWEEN_PASSES)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        with self.autocast():
            output = super().forward_maybe_with_nosync(*args, **kwargs)
        # A stage without trainable parameters outputs tensors that need no gradient, but the next
        # stage sends a gradient all the same.
        return output if output.requires_grad else output.requires_grad_()
