"""The loss of multi-token prediction (MTP): the weight over the number of depths, times the summed
losses of all depths (DeepSeek-V3, arXiv:2412.19437, section 2.2).

As there, each depth's sum is divided by the trained tokens of the step, like the main loss; labels
have their loss weights at every depth, and the divisor is then the sum of those of the step. A
position counts at depth k if the token k + 1 further on is of its document and trained. T tokens, K
depths.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.config.schema.train import TrainConfig
from penstock.engine.distributed.parallel_model import ParallelModel
from penstock.engine.distributed.vocab_parallel import SumLossFn
from penstock.engine.step_part import StepPart, StepState
from penstock.engine.vision.image_inputs import ImageInputBuilder
from penstock.losses.labels import IGNORED, Labels
from penstock.models.decoder import OutputFn
from penstock.models.decoder_config import DecoderConfig
from penstock.models.multi_token_prediction import FurtherTokens
from penstock_kernels.to_device import to_device


@dataclass
class MTPLoss(StepPart):
    """The loss of a parallelized model with layers that predict further tokens."""

    weight: float
    depths: int
    layout: ParallelModel
    loss_fn: SumLossFn
    _total: torch.Tensor = field(init=False, repr=False)
    """This rank's mean over the depths, without weight and scale; fp64 [1]."""

    def before_forward(self, step: StepState) -> None:
        """Give the calls the losses of all depths, multiplied by the loss scale."""
        device = step.calls[0].input_ids_T.device
        self._total = torch.zeros(1, dtype=torch.float64, device=device)
        if all(head is None for *_, head in (part.edges for part in self.layout.parts)):
            # The last stage of a pipeline has those layers.
            return
        depth_loss = partial(self._depth_loss, step.counts.divisor, step.scale, self._total)
        for number, batch in enumerate(step.batches):
            # Id 0 where the document has no further token: no earlier one attends to it.
            lengths, depths = batch.lengths, self.depths
            ids_KT = self._own_tokens(shifted(batch.input_ids_T, lengths, depths, 0))
            labels_KT = self._own_tokens(shifted(batch.labels_T, lengths, depths, IGNORED))
            weights_KT: Sequence[torch.Tensor | None] = [None] * depths
            if batch.loss_weights_T is not None:
                further_KT = shifted(batch.loss_weights_T, lengths, depths, 0)
                weights_KT = self._own_tokens(further_KT).unbind()
            labels = [
                Labels.from_host(labels_S, device, weights_S)
                for labels_S, weights_S in zip(labels_KT, weights_KT, strict=True)
            ]
            outputs: list[OutputFn] = [partial(depth_loss, depth) for depth in labels]
            index_KT, images = None, self.layout.images
            if batch.images is not None and isinstance(images, ImageInputBuilder):
                index_KT = shifted(images.feature_index(batch), lengths, depths, -1)
                index_KT = to_device(self._own_tokens(index_KT), device)
            further = FurtherTokens(to_device(ids_KT, device), outputs, index_KT)
            step.calls[number] = replace(step.calls[number], further=further)

    def after_backward(self, step: StepState) -> torch.Tensor:
        del step
        return self._total

    def finish(self, step: StepState, totals: Sequence[float]) -> Mapping[str, Any]:
        del step
        return {"mtp_loss": totals[0]}

    def _own_tokens(self, values_KT: torch.Tensor) -> torch.Tensor:
        """This context-parallel rank's tokens: those whose hidden states it has."""
        return torch.stack([self.layout.context.shard_tensor(values_T) for values_T in values_KT])

    def _depth_loss(
        self,
        divisor: float,
        scale: float,
        total: torch.Tensor,
        labels: Labels,
        hidden: torch.Tensor,
        head: nn.Module,
    ) -> torch.Tensor:
        """Zero, with the gradient of one depth's part of the loss."""
        factor = self.weight * scale
        loss = self.loss_fn(hidden, head, labels, scale=factor / self.depths / divisor)
        # Ranks along the tensor axis have the same loss: one of them reports it.
        if self.layout.mesh.index("tensor") == 0:
            total += loss.detach().double() / factor
        # Zero, as `loss` is told without the further tokens.
        return loss - loss.detach()


def build_mtp_loss(
    train: TrainConfig, config: DecoderConfig, layout: ParallelModel, loss_fn: SumLossFn
) -> MTPLoss | None:
    """The MTP loss of a run; None without one."""
    if not config.num_mtp_layers:
        return None
    return MTPLoss(train.mtp_loss_weight, config.num_mtp_layers, layout, loss_fn)


def shifted(values_T: torch.Tensor, lengths: Sequence[int], depths: int, fill: int) -> torch.Tensor:
    """The values 1 to K positions further on in the document, [K, T]; `fill` where it has none."""
    sizes = torch.tensor(lengths)
    # How many tokens of the document come after each, [T].
    left_T = sizes.cumsum(0).repeat_interleave(sizes) - torch.arange(int(sizes.sum())) - 1
    steps = range(1, depths + 1)
    return torch.stack([values_T.roll(-k).masked_fill(left_T < k, fill) for k in steps])
