"""Parallel model: this rank's model parts, and the forward and backward passes through them."""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from penstock.config.schema.train import TrainConfig
from penstock.core.errors import StageError
from penstock.core.process.rank_heartbeat import Heartbeat
from penstock.engine.distributed.collectives import local_share
from penstock.engine.distributed.context_parallel import ContextParallel
from penstock.engine.distributed.data_parallel import GradSync
from penstock.engine.distributed.device_mesh import Mesh
from penstock.engine.distributed.param_shards import LocalParam
from penstock.engine.distributed.pipeline_stages import layers_of_stages, stages_of_rank
from penstock.engine.distributed.tensor_parallel import reduce_partial_grads
from penstock.engine.vision.image_inputs import ImageInputBuilder
from penstock.engine.vision.image_text import ImageTextInputs
from penstock.models.causal_lm import CausalLM
from penstock.models.decoder import OutputFn, PipelineStageModules
from penstock.models.decoder_config import DecoderConfig
from penstock.models.flops import layer_flops
from penstock.models.layers.dropout import DropoutRNG, dropout_rng
from penstock.models.layers.router_observer import (
    ModalityTokens,
    RouterObserver,
    observe_routers,
    route_modalities,
)
from penstock.models.multi_token_prediction import FurtherTokens
from penstock.models.vision.tower import ImageInputs
from penstock.rows.collate import MicroBatch
from penstock.rows.reader import RowImage
from penstock_kernels.attention import VarlenMetadata
from penstock_kernels.to_device import to_device

AutocastContext = Callable[[], AbstractContextManager[object]]
"""Context manager around a forward pass, such as autocast."""


@dataclass(frozen=True)
class ModelInputs:
    """Model inputs of a micro-batch: device tensors with this rank's tokens only."""

    input_ids_T: torch.Tensor  # noqa: N815 - T names the dimension
    position_ids_T: torch.Tensor  # noqa: N815 - T names the dimension
    segments: VarlenMetadata
    """Document boundaries, as this rank's attention needs them."""
    output_fn: OutputFn
    """Function from hidden states and LM head to the summed loss of this rank's tokens."""
    dropout: DropoutRNG | None = None
    router_observer: RouterObserver | None = None
    further: FurtherTokens | None = None
    """What layers that predict further tokens read; None where they are not run."""
    images: ImageInputs | None = None
    """What the vision part reads; None where it is not called."""
    modalities: ModalityTokens | None = None
    """The tokens of images, where these have experts of their own."""

    @contextmanager
    def in_context(self) -> Generator[None]:
        """Context manager around a forward pass: what modules find of this micro-batch."""
        observing = observe_routers(self.router_observer)
        with dropout_rng(self.dropout), observing, route_modalities(self.modalities):
            yield

    @property
    def extra_args(self) -> dict[str, Any]:
        """`further` and `images` if they are there: not all models take them."""
        arguments = {"further": self.further, "images": self.images}
        return {name: value for name, value in arguments.items() if value is not None}


if TYPE_CHECKING:
    # Importing it takes a second, so only its users do.
    from penstock.engine.distributed.pipeline_parallel import Pipeline


@dataclass(frozen=True)
class ParallelModel:
    """This rank's parts of the model, and the ranks it communicates with."""

    mesh: Mesh
    parts: Sequence[CausalLM]
    """One part, or one for each pipeline stage of this rank."""
    params: Sequence[LocalParam]
    context: ContextParallel
    sync: GradSync
    pipeline: "Pipeline | None"
    autocast: AutocastContext
    """Context manager around forward passes: autocast, if the weights are not cast themselves."""
    images: ImageInputBuilder | ImageTextInputs | None = None
    """None for a model without a vision part."""
    heartbeat: Heartbeat = field(default_factory=Heartbeat, compare=False)
    """Reports which pass begins; gradient reduction counts as backward."""

    @property
    def trainable(self) -> list[LocalParam]:
        return [local_param for local_param in self.params if local_param.parameter.requires_grad]

    @property
    def model_parallel_size(self) -> int:
        """Ranks that compute the same packed sequences together."""
        return self.mesh.dims.world_size // self.mesh.dims.num_replicas

    @property
    def is_loss_rank(self) -> bool:
        """Whether this rank of a stage reports for those with the same packed sequences."""
        return self.mesh.index("tensor", "ring", "ulysses") == 0

    def build_inputs(
        self,
        batch: MicroBatch,
        reduce: OutputFn,
        device: torch.device,
        noise: DropoutRNG | None = None,
    ) -> ModelInputs:
        images = None
        if self.images is not None:
            batch = self.images.with_layout(batch)
            images = self.images.build(batch, self.context.shard_tensor, device)
        elif batch.images is not None:
            raise StageError(
                "a micro-batch has images, and the model was built without its vision part."
            )
        local = self.context.shard_batch(batch)
        return ModelInputs(
            to_device(local.input_ids_T, device),
            to_device(local.position_ids_T, device),
            self.context.varlen_metadata(batch, device),
            reduce,
            noise,
            images=images,
            modalities=self._modalities(batch, device),
        )

    def skipped_positions(self, images: Sequence[RowImage]) -> int:
        """By how much the RoPE positions of text after these images are below the indices of its
        tokens."""
        if not images or not isinstance(self.images, ImageInputBuilder):
            return 0
        return self.images.skipped_positions(images)

    def _modalities(self, batch: MicroBatch, device: torch.device) -> ModalityTokens | None:
        if not isinstance(self.images, ImageInputBuilder):
            return None
        group = self.mesh.group("tensor")

        def shard(tokens_T: torch.Tensor) -> torch.Tensor:
            mine_T = self.context.shard_tensor(tokens_T)
            # Each rank of the tensor axis computes MoE layers for its share of the tokens.
            return mine_T if group is None else local_share(mine_T, group)

        return self.images.modalities(batch, shard, device)

    def forward_backward(self, calls: Sequence[ModelInputs]) -> torch.Tensor:
        """Accumulate the gradients of the calls, summed over all ranks, in the parameters.

        Returns this rank's share of the summed losses, a scalar in fp32.
        """
        if self.pipeline:
            # Torch's stages set FSDP's flags for each pass themselves; DDP's sums begin here.
            self.sync.prepare_backward(last=True)
            total = self.pipeline.forward_backward(calls)
            self.heartbeat.set_phase("backward")
        else:
            total = self._accumulate(calls)
        unused = self.images.unused() if self.images else []
        self.sync.wait()
        for parameter in unused:
            parameter.grad = None
        # Only now: FSDP2 sets `grad` when it has reduced it over the data ranks.
        reduce_partial_grads(self.trainable, self.mesh)
        if self.pipeline:
            self.pipeline.all_reduce_copied_grads()
        return self._tp_share(total)

    def forward(self, calls: Sequence[ModelInputs]) -> torch.Tensor:
        """The summed losses without gradients, in fp64."""
        with self.eval_mode():
            if self.pipeline:
                total = self.pipeline.forward(calls).double()
            else:
                total = torch.stack([self._forward_one(call).double() for call in calls]).sum()
        return self._tp_share(total)

    @contextmanager
    def eval_mode(self) -> Generator[None]:
        """Evaluation mode, without dropout or other random draws."""
        for part in self.parts:
            part.eval()
        try:
            yield
        finally:
            for part in self.parts:
                part.train()

    @torch.no_grad()
    def forward_only(self, *calls: ModelInputs) -> None:
        """Run forward passes in the current mode, for what `reduce` itself records."""
        if self.pipeline:
            self.pipeline.forward(calls)
        else:
            for call in calls:
                self._forward_one(call)

    def forward_for_observers(self, calls: Sequence[ModelInputs]) -> None:
        """Run a forward pass as in training for router observers, without a loss."""
        further = [call.further and call.further.with_output(no_loss) for call in calls]
        pairs = zip(calls, further, strict=True)
        self.forward_only(*(replace(call, output_fn=no_loss, further=f) for call, f in pairs))

    def _accumulate(self, calls: Sequence[ModelInputs]) -> torch.Tensor:
        total = torch.zeros((), device=calls[0].input_ids_T.device)
        for index, call in enumerate(calls):
            self.sync.prepare_backward(last=index == len(calls) - 1)
            self.heartbeat.set_phase("forward")
            loss = self._forward_one(call)
            self.heartbeat.set_phase("backward")
            loss.backward()
            total += loss.detach()
        return total

    def _forward_one(self, call: ModelInputs) -> torch.Tensor:
        [model] = self.parts
        with self.autocast(), call.in_context():
            inputs = (call.input_ids_T, call.position_ids_T, call.segments)
            return model(*inputs, call.output_fn, **call.extra_args)

    def _tp_share(self, total: torch.Tensor) -> torch.Tensor:
        # Ranks along the tensor axis compute the same sum; one of them reports it.
        return total if self.mesh.index("tensor") == 0 else torch.zeros_like(total)


def no_loss(hidden_TD: torch.Tensor, _: nn.Module) -> torch.Tensor:
    """The output function of a pass without a loss: zero."""
    return hidden_TD.new_zeros(())


def build_stage_modules(
    config: DecoderConfig, train: TrainConfig, index: int, length: int
) -> list[PipelineStageModules]:
    """The modules of the rank at `index` in its pipeline, in stage order. Stages are split by the
    cost of layers for documents of `length` tokens. Raises ConfigError as `layers_of_stages` does.
    """
    if train.pipeline_parallel_size == 1:
        return [PipelineStageModules.all_of(config)]
    layers = layers_of_stages(train, layer_flops(config, length), config.num_mtp_layers)
    last = len(layers) - 1
    return [
        PipelineStageModules(layers[stage], has_embedding=stage == 0, has_head=stage == last)
        for stage in stages_of_rank(train, index)
    ]
