"""Pairs of answers to prompts with images, in packed rows, and as transformers computes them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from penstock.rows.image_batch import ImageBatch
from penstock.rows.image_files import MEDIA, StoredImage, write_images
from penstock.rows.pixel_table import StoredTensor, stored
from penstock.rows.ref_logprobs import write_scores
from penstock.rows.schema import DIGEST_BYTES, packed_schema
from tests.models.images import image_documents, their_logits

ROWS = ([1, 0], [0], [3, 1], [2])
"""Images of each prompt in each row: on two replicas some have images while others have none."""
BETA = 0.3


@dataclass(frozen=True)
class ImagePair:
    """A prompt with images, and two answers."""

    prompt: torch.Tensor
    answers: tuple[torch.Tensor, torch.Tensor]
    images: ImageBatch | None

    @property
    def digest(self) -> bytes:
        """What its row calls it."""
        content = repr((self.prompt.tolist(), [one.tolist() for one in self.answers]))
        return hashlib.blake2b(content.encode(), digest_size=DIGEST_BYTES).digest()


def image_pairs(model_type: str) -> list[ImagePair]:
    """The pairs of all rows, in order."""
    prompts, _, images = image_documents(model_type, [n for row in ROWS for n in row])
    generator = torch.Generator().manual_seed(9)
    sizes = torch.randint(1, 9, (len(prompts), 2), generator=generator).tolist()
    answers = [
        tuple(torch.randint(10, 131, (size,), generator=generator) for size in each)
        for each in sizes
    ]
    return [
        ImagePair(prompt, (chosen, rejected), its)
        for prompt, (chosen, rejected), its in zip(prompts, answers, images, strict=True)
    ]


def write_pairs(folder: Path, pairs: Sequence[ImagePair], *, shares: bool) -> Path:
    """A packed artifact, with the images' tensors."""
    schema = packed_schema("preference", has_images=True)
    media: dict[bytes, dict[str, StoredTensor]] = {}
    rows: list[dict[str, Any]] = []
    left = iter(pairs)
    for numbers in ROWS:
        row: dict[str, Any] = {name: [] for name in schema.names}
        for _ in numbers:
            pair = next(left)
            images = _split(pair.images)
            media |= images
            _write_pair(row, pair, [*images], shares)
        rows.append(row)
    place = folder / "data" / "train"
    place.mkdir(parents=True)
    with pa.ipc.new_file(str(place / "rows-00000-of-00001.arrow"), schema) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    (folder / MEDIA).mkdir()
    write_images(
        folder / MEDIA / "images.arrow",
        (StoredImage(digest, tensors, (1, 1)) for digest, tensors in media.items()),
    )
    return folder


def _write_pair(row: dict[str, Any], pair: ImagePair, digests: list[bytes], shares: bool) -> None:
    before = pair.prompt[:-1].tolist()
    shared, own = (before, []) if shares else ([], before)
    row["input_ids"] += shared
    row["labels"] += [-100] * len(shared)
    for answer in pair.answers:
        row["input_ids"] += [*own, int(pair.prompt[-1]), *answer[:-1].tolist()]
        row["labels"] += [*[-100] * len(own), *answer.tolist()]
        row["branches"].append(len(own) + len(answer))
    sizes, copies = row["branches"][-2:], 1 if shares else 2
    row["lengths"] += [len(shared) + sum(sizes)] if shares else sizes
    row["prompts"] += [len(shared)] * copies
    row["samples"].append(pair.digest)
    row["images"] += digests * copies
    row["image_tokens"] += [*(pair.images.token_counts if pair.images else ())] * copies
    row["image_counts"] += [len(digests)] * copies


def _split(images: ImageBatch | None) -> dict[bytes, dict[str, StoredTensor]]:
    """The tensors of each image."""
    found: dict[bytes, dict[str, StoredTensor]] = {}
    for at in range(len(images) if images else 0):
        assert images is not None
        tensors = dict(images.tensors)
        if "image_grid_thw" in tensors:
            sizes = tensors["image_grid_thw"].prod(-1).tolist()
            pixels = tensors.pop("pixel_values").split(sizes)[at]
            one = {"pixel_values": pixels, "image_grid_thw": tensors["image_grid_thw"][at : at + 1]}
        else:
            one = {name: each[at : at + 1] for name, each in tensors.items()}
        arrays = {name: np.ascontiguousarray(each.numpy()) for name, each in one.items()}
        digest = hashlib.sha256(b"".join(each.tobytes() for each in arrays.values())).digest()
        found[digest] = {name: stored(each) for name, each in arrays.items()}
    return found


def write_reference(folder: Path, pairs: Sequence[ImagePair], model: Any) -> Any:
    """Reference log-probs near those of a model, [pairs, 2]."""
    with torch.no_grad():
        scores = np.array([[float(one) for one in log_probs(model, pair)] for pair in pairs])
    scores += np.random.default_rng(4).normal(size=scores.shape)
    write_scores(folder, [pair.digest for pair in pairs], scores)
    return scores


def log_probs(model: Any, pair: ImagePair) -> list[torch.Tensor]:
    """Those of both answers by transformers, each after its prompt."""
    found = []
    for answer in pair.answers:
        logits = their_logits(model, torch.cat([pair.prompt, answer]), pair.images)
        of_answer = logits[len(pair.prompt) - 1 : -1].log_softmax(-1)
        found.append(of_answer.gather(1, answer[:, None]).double().sum())
    return found


def dpo_loss(model: Any, pairs: Sequence[ImagePair], reference: Any) -> torch.Tensor:
    """-log sigmoid(beta * (log-ratio of the chosen - log-ratio of the rejected)), the mean."""
    losses = []
    for pair, scores in zip(pairs, reference, strict=True):
        chosen, rejected = log_probs(model, pair)
        margin = (chosen - scores[0]) - (rejected - scores[1])
        losses.append(-nn.functional.logsigmoid(BETA * margin))
    return torch.stack(losses).mean()
