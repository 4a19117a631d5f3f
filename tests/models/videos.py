"""Documents with videos and images for tiny models of transformers, and their logits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import numpy as np
import torch

from penstock.models.vision.features import SECONDS
from penstock.models.vision.types import VISION_TYPES
from penstock.rows.collate import MicroBatch
from penstock.rows.image_batch import ImageBatch
from penstock.rows.pixel_table import stored
from penstock.rows.reader import RowImage
from tests.models.images import IMAGE, VIDEO, micro_batch

PATCH = 3 * 2 * 4 * 4
"""Values of a patch: channels, frames, and pixels."""

TYPES = tuple(name for name, one in VISION_TYPES.items() if one.video)

Media = Sequence[str]
"""`image` and `video`, in order."""

ROWS: Sequence[Sequence[Media]] = (
    (("video", "image"), ()),
    ((),),
    (("image", "video", "video"),),
    (("video",), ("image",)),
)
"""The media of each document of the micro-batches of a step: on two replicas some have videos while
others have none."""


@dataclass(frozen=True)
class VideoDocument:
    """Tokens with their media."""

    ids: torch.Tensor
    labels: torch.Tensor
    media: Sequence[RowImage]


def video_documents(model_type: str, media: Sequence[Media], seed: int = 0) -> list[VideoDocument]:
    """A document with each of these media, of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    return [_document(model_type, kinds, generator) for kinds in media]


def _document(model_type: str, kinds: Media, generator: torch.Generator) -> VideoDocument:
    def text(length: int) -> torch.Tensor:
        return torch.randint(10, 131, (length,), generator=generator)

    kind, parts, media = VISION_TYPES[model_type].video, [text(4)], list[RowImage]()
    assert kind is not None
    for at, name in enumerate(kinds):
        frames = 2 + at % 2 if name == "video" else 1
        height, width = 4 - 2 * (at % 2), 4
        features = height * width // 4
        tensors = {
            "pixel_values": torch.randn(
                frames * height * width, PATCH, generator=generator
            ).numpy(),
            "image_grid_thw": np.array([[frames, height, width]]),
        }
        runs = [torch.full((frames * features,), VIDEO if name == "video" else IMAGE)]
        if name == "video":
            tensors[SECONDS] = np.array([0.3 + 0.5 * at], np.float32)
            if kind.is_split:
                runs = [
                    part
                    for _ in range(frames)
                    for part in (text(2), torch.full((features,), VIDEO))
                ]
        parts += [*runs, text(3)]
        digest = sha256(tensors["pixel_values"].tobytes()).digest()
        row = {key: stored(value) for key, value in tensors.items()}
        media.append(RowImage(row, frames * features, digest))
    ids = torch.cat([*parts, text(5)])
    labels = torch.cat((ids[1:], torch.tensor([-100])))
    return VideoDocument(ids, labels.masked_fill(labels < 10, -100), media)


def video_batch(documents: Sequence[VideoDocument], length: int = 0) -> MicroBatch:
    """Documents in one row, padded to a length."""
    ids, labels = [one.ids for one in documents], [one.labels for one in documents]
    media = [each for one in documents for each in one.media]
    batch = micro_batch(ids, labels, [None] * len(ids), length)
    return replace(batch, images=ImageBatch.concatenate(media))


def their_inputs(document: VideoDocument) -> dict[str, torch.Tensor]:
    """The arguments of transformers' model: images and videos apart."""
    ids = document.ids
    found = {"mm_token_type_ids": ((ids == IMAGE).int() + 2 * (ids == VIDEO).int())[None]}
    for is_video, ending in ((False, ""), (True, "_videos")):
        its = [one.tensors for one in document.media if (SECONDS in one.tensors) == is_video]
        if its:
            grid = "video_grid_thw" if is_video else "image_grid_thw"
            found[f"pixel_values{ending}"] = _joined(its, "pixel_values")
            found[grid] = _joined(its, "image_grid_thw")
            if is_video:
                found[SECONDS] = _joined(its, SECONDS)
    return found


def _joined(tensors: Sequence[Any], name: str) -> torch.Tensor:
    return torch.cat([torch.from_numpy(one[name].numpy()) for one in tensors])


def their_logits(model: Any, document: VideoDocument) -> torch.Tensor:
    """Of one document alone."""
    inputs = their_inputs(document)
    if model.config.model_type != "qwen2_5_vl":
        inputs.pop(SECONDS, None)
    return model(
        input_ids=document.ids[None], attention_mask=None, use_cache=False, **inputs
    ).logits[0]
