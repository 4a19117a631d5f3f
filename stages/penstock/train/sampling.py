"""What a model answers to the same prompts while it is trained.

Each token costs a pass over its prompt: nothing is kept between passes, so that any layout that can
train can answer, and its answers are those of the weights as they are.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.engine.assemble import Assembled
from penstock.engine.ranks import Ranks
from penstock.rows.collate import MicroBatch, collate
from penstock.rows.reader import Row
from penstock.rows.schema import IGNORED
from penstock.train.job import Job
from penstock.train.loader import Reading

if TYPE_CHECKING:
    from penstock.train.prompts import Prompts


class Sampler:
    """Answers prompts with the likeliest tokens. Every rank makes one and makes the same calls."""

    def __init__(
        self,
        prompts: "Prompts | None",
        built: Assembled,
        ranks: Ranks,
        *,
        max_new_tokens: int,
        pad_to_multiple_of: int,
    ) -> None:
        """`prompts` are the leading rank's to give."""
        self._prompts, self._built, self._ranks = prompts, built, ranks
        self._most, self._multiple = max_new_tokens, pad_to_multiple_of
        told = ranks.gather((prompts.tokens, prompts.end) if prompts else None)[0]
        assert told is not None
        self._tokens, self._end = told

    def answer(self, is_asked_to_stop: Callable[[], object]) -> list[dict[str, Any]] | None:
        """Each prompt and its answer, told on the leading rank alone.

        None when any rank is asked to stop before the end.
        """
        answers: list[list[int]] = [[] for _ in self._tokens]
        for _ in range(self._most):
            if self._ranks.anywhere(bool(is_asked_to_stop())):
                return None
            going_on = [n for n, answer in enumerate(answers) if not self._has_ended(answer)]
            if not going_on:
                break
            self._ranks.pulse.begins("answering prompts")
            batch, slots_T = self._batch(going_on, answers)
            found = self._built.onlooker.next_tokens(batch, slots_T, len(answers)).tolist()
            for number in going_on:
                answers[number].append(found[number])
        return self._prompts.told(answers) if self._prompts else []

    def _batch(
        self, going_on: Sequence[int], answers: Sequence[Sequence[int]]
    ) -> tuple[MicroBatch, torch.Tensor]:
        """Prompts and what there is of their answers, those that this replica computes, and the
        slot of each one's last token."""
        replicas = self._built.degrees.num_replicas
        index = self._built.engine.layout.mesh.index("replicate", "shard")
        rows: list[Row] = []
        for number in going_on[index::replicas]:
            ids = np.array([*self._tokens[number], *answers[number]], dtype=np.int32)
            rows.append(
                Row(ids, np.full_like(ids, IGNORED), np.array([len(ids)], np.int32), number)
            )
        [batch] = collate([rows], pad_to_multiple_of=self._multiple).micro_batches()
        slots_T = torch.full((sum(batch.lengths),), -1, dtype=torch.int64)
        ends = np.cumsum([size for _, size in batch.rows])
        for (number, _), end in zip(batch.rows, ends.tolist(), strict=True):
            slots_T[end - 1] = number
        return batch, slots_T

    def _has_ended(self, answer: Sequence[int]) -> bool:
        return bool(answer) and answer[-1] == self._end


def sampler_of(job: Job, built: Assembled, ranks: Ranks, reading: Reading) -> Sampler | None:
    """What the settings ask for; None: no prompts."""
    train, prompts = job.config.train, None
    if not train.sample_prompts:
        return None
    if ranks.leads:
        # Tokenizers come with a library that takes seconds, and that no other rank needs.
        from penstock.train.prompts import Prompts  # noqa: PLC0415

        assert job.tokenizer is not None
        prompts = Prompts.of(train.sample_prompts, job.tokenizer, job.tokenizer_revision)
    return Sampler(
        prompts,
        built,
        ranks,
        max_new_tokens=train.sample_max_new_tokens,
        pad_to_multiple_of=reading.pad_to_multiple_of,
    )
