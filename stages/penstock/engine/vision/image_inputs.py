"""Images and videos of a micro-batch as model inputs of this rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import nn

from penstock.core.errors import CapabilityError
from penstock.engine.vision.image_shares import ImageShares
from penstock.models.layers.router_observer import ModalityTokens
from penstock.models.vision.features import SECONDS, dummy_hidden, dummy_image
from penstock.models.vision.positions import image_places, image_runs, mrope_positions
from penstock.models.vision.tower import ImageInputs, VisionTower
from penstock.models.vision.types import VISION_TYPES, VisionConfig
from penstock.rows.collate import MicroBatch
from penstock.rows.image_batch import ImageBatch
from penstock.rows.reader import RowImage
from penstock_kernels.to_device import to_device

GRID = "image_grid_thw"


@dataclass(frozen=True)
class ImageInputBuilder:
    """Builds the inputs of a model whose vision part is trained, or frozen and called."""

    config: VisionConfig
    tower: VisionTower | None
    """The vision part; None in the pipeline stages after the first."""
    fills: bool
    """Whether micro-batches without images get a blank one. Under FSDP every rank must call the
    vision part equally often, since its weights are gathered in each call; and if it is trained,
    each of its parameters must have a gradient on every rank and in every layout, of zeros where
    there are no images, for the optimizer to update it in all of them alike."""
    is_encoded: bool = False
    """Whether images have stored features (`data.encode_images`)."""
    shares: ImageShares | None = None
    """The ranks that divide the images of a micro-batch; None for a rank that has them all."""

    def with_layout(self, batch: MicroBatch) -> MicroBatch:
        """The micro-batch with what its images change, if it has some: RoPE positions [T, 3], or
        the runs of their tokens, which are bidirectional.

        Raises StageError if images and tokens do not belong together.
        """
        images = batch.images
        if images is None:
            return batch
        if self.config.type.bidirectional:
            runs = image_runs(self._places(batch, images), batch.lengths)
            return replace(batch, bidirectional=runs)
        if self.config.rope_axes is None:
            return batch
        grids, counts = images.of_each(images.tensors[GRID].cpu().numpy()), images.token_counts
        if self.config.type.video and self.config.type.video.is_split:
            # Each temporal patch of a video counts as an image of its own.
            frames = grids[:, 0]
            counts = np.repeat(np.array(counts) // frames, frames).tolist()
            grids = np.repeat(grids, frames, axis=0)
            grids[:, 0] = 1
        positions_T3 = mrope_positions(
            self._places(batch, images),
            batch.position_ids_T.numpy(),
            batch.lengths,
            grids,
            counts,
            self.config.merge_size,
            self._intervals(images),
        )
        return replace(batch, position_ids_T=torch.from_numpy(positions_T3))

    def skipped_positions(self, images: Sequence[RowImage]) -> int:
        """By how much the RoPE positions of text after these images are below the indices of its
        tokens."""
        if self.config.rope_axes is None:
            return 0
        grids = np.concatenate([image.tensors[GRID].numpy() for image in images])
        sides = grids[:, 1:].max(axis=1) // self.config.merge_size
        return sum(image.num_tokens for image in images) - int(sides.sum())

    def build(
        self,
        batch: MicroBatch,
        shard: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
    ) -> ImageInputs | None:
        """The inputs, of which `shard` takes this rank's tokens; None without a vision part here,
        or if it is not called."""
        images = batch.images
        if self.tower is None or (images is None and not self.fills):
            return None
        index_T = to_device(shard(self.feature_index(batch)), device)
        gather = None
        if images is not None and self.shares:
            counts = images.distinct_counts
            parts = self.shares.divide(counts)
            features = [sum(counts[part.start : part.stop]) for part in parts]
            images = images.take(parts[self.shares.index])
            gather = partial(self.shares.gather, counts=features)
        if images:
            return ImageInputs(images.to_device(device), index_T, gather)
        inputs = dummy_hidden(self.tower) if self.is_encoded else dummy_image(self.tower)
        tensors = {name: to_device(tensor, device) for name, tensor in inputs.items()}
        return ImageInputs(tensors, index_T, gather)

    def feature_index(self, batch: MicroBatch) -> torch.Tensor:
        """The index of each token's feature, int64 [T]; -1 for other tokens."""
        index_T = np.full(sum(batch.lengths), -1, dtype=np.int64)
        if batch.images is not None:
            index_T[self._places(batch, batch.images)] = batch.images.feature_order()
        return torch.from_numpy(index_T)

    def modalities(
        self,
        batch: MicroBatch,
        shard: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
    ) -> ModalityTokens | None:
        """The tokens of images, of which `shard` takes those that this rank's MoE layers compute;
        None where all tokens have the same experts."""
        if not self.config.modality_ids:
            return None
        is_image_T = np.isin(batch.input_ids_T.numpy(), self.config.modality_ids)
        is_text_T = 1 - shard(torch.from_numpy(is_image_T.astype(np.int64)))
        # Found on the host: on a GPU, finding them would wait for it.
        indices = (torch.nonzero(is_text_T == value).flatten() for value in (1, 0))
        return ModalityTokens(*(to_device(tensor, device) for tensor in (is_text_T, *indices)))

    def unused(self) -> list[nn.Parameter]:
        """The trained parameters that have no gradient after a backward pass, as the features do
        not depend on them: an optimizer leaves these as they are, in every layout."""
        named = [] if self.tower is None or not self.fills else self.tower.parameters()
        return [param for param in named if param.requires_grad and param.grad is None]

    def _places(self, batch: MicroBatch, images: ImageBatch) -> np.ndarray:
        tokens: int | tuple[int, ...] = self.config.image_token_id
        if SECONDS in images.tensors:
            tokens = (tokens, require_videos(self.config))
        return image_places(batch.input_ids_T.numpy(), tokens, images.token_counts)

    def _intervals(self, images: ImageBatch) -> list[float] | None:
        """Positions between temporal patches of each image or video; None: 1."""
        if self.config.tokens_per_second is None or SECONDS not in images.tensors:
            return None
        # In fp32, as transformers multiplies them.
        scale = np.float32(self.config.tokens_per_second)
        # Images have one temporal patch.
        seconds = images.number_of_each(SECONDS, 0.0)
        return [float(scale * np.float32(second)) for second in seconds]


def require_videos(config: VisionConfig) -> int:
    """The token of videos. Raises CapabilityError for a model that is not trained on them."""
    if config.video_token_id is None:
        types = ", ".join(name for name, kind in VISION_TYPES.items() if kind.video)
        raise CapabilityError(
            f"the data has videos, and models of type {config.hf_config.get('model_type')} are not"
            f" trained on them.\n  Use a model of one of these types: {types}."
        )
    return config.video_token_id
