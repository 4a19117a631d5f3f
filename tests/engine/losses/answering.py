"""Answers to learn from, in packed rows, and what a reference model is taken to make of them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from penstock.rows.ref_logprobs import write_scores
from penstock.rows.schema import DIGEST_BYTES, PACKED_KTO, PACKED_SCORED, packed_schema

ROW = 4
"""Samples in every other row; those between hold one less."""


@dataclass(frozen=True)
class Asked:
    """A prompt and two answers, of a token each at least."""

    prompt: list[int]
    answers: tuple[list[int], list[int]]
    desirable: bool | None = None
    score_gap: float | None = None

    @property
    def digest(self) -> bytes:
        """Of its content, as packed rows name it."""
        return hashlib.blake2b(repr(self).encode(), digest_size=DIGEST_BYTES).digest()


def random_samples(count: int, vocabulary: int, *, judged: bool = False, seed: int = 0):
    """Of uneven lengths; in each the first answer is another one than the second."""
    rng = np.random.default_rng(seed)

    def ids(most: int) -> list[int]:
        return rng.integers(0, vocabulary, size=int(rng.integers(1, most))).tolist()

    return [
        Asked(
            [number % vocabulary, *ids(20)], (ids(14), ids(14)), number % 3 > 0 if judged else None
        )
        for number in range(count)
    ]


def write_answers(
    folder: Path, samples: Sequence[Asked], split: str = "train", *, shares_prompts: bool = True
) -> Path:
    """Packed rows of these samples, whose prompts are shared, or stored before each answer."""
    is_judged = samples[0].desirable is not None
    is_scored = samples[0].score_gap is not None
    schema = packed_schema("kto" if is_judged else "preference", is_scored=is_scored)
    rows: list[dict[str, Any]] = []
    left = list(samples)
    while left:
        count = ROW - len(rows) % 2
        rows.append(_row(left[:count], shares_prompts))
        del left[:count]
    place = folder / "data" / split
    place.mkdir(parents=True)
    table = pa.Table.from_pylist(rows, schema=schema)
    with pa.ipc.new_file(str(place / "rows-00000-of-00001.arrow"), schema) as writer:
        writer.write_table(table)
    return folder


def _row(samples: Sequence[Asked], shares_prompts: bool) -> dict[str, Any]:
    row: dict[str, Any] = {name: [] for name in (*PACKED_KTO.names, *PACKED_SCORED.names)}
    for sample in samples:
        before = sample.prompt[:-1]
        shared, own = (before, []) if shares_prompts else ([], before)
        row["input_ids"] += shared
        row["labels"] += [-100] * len(shared)
        for answer in sample.answers:
            row["input_ids"] += [*own, sample.prompt[-1], *answer[:-1]]
            row["labels"] += [*[-100] * len(own), *answer]
            row["branches"].append(len(own) + len(answer))
        sizes = row["branches"][-2:]
        row["lengths"] += [len(shared) + sum(sizes)] if shares_prompts else sizes
        row["prompts"] += [len(shared)] if shares_prompts else [0, 0]
        row["samples"].append(sample.digest)
        row["desirable"].append(bool(sample.desirable))
        row["score_gaps"].append(sample.score_gap)
    return row


def write_reference(folder: Path, samples: Sequence[Asked], scores: Any = None) -> Path:
    """Their scores, [D, A]; by default numbers near those of an untrained model."""
    if scores is None:
        rng = np.random.default_rng(1)
        lengths = np.array([[len(answer) for answer in each.answers] for each in samples])
        scores = -5.8 * lengths + rng.normal(size=lengths.shape)
    write_scores(folder, [each.digest for each in samples], np.asarray(scores))
    return folder


@torch.no_grad()
def scores_of(model: Any, samples: Sequence[Asked]) -> np.ndarray:
    """What a model of transformers makes of answers, [D, A]."""
    found: list[float] = []
    for sample in samples:
        for answer in sample.answers:
            ids = torch.tensor([sample.prompt + answer])
            log_probs = model(ids).logits[0, :-1].log_softmax(-1)
            own = log_probs.gather(1, ids[0, 1:, None])[-len(answer) :]
            found.append(own.double().sum().item())
    return np.array(found).reshape(-1, 2)
