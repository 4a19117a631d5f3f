"""Reference log-probs: sequence log-probs of completions under the current weights."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import torch

from penstock.config.schema.run import RunConfig
from penstock.engine.build import BuiltModel
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.rows.collate import collate
from penstock.rows.reader import Row
from penstock.rows.ref_logprobs import Scores
from penstock.rows.shared_prefix import PER_SAMPLE
from penstock.train.dataloader import LoaderConfig
from penstock.train.row_costs import local_micro_batches

MICRO_BATCHES_PER_CHUNK = 8
"""Micro-batches per replica and forward call."""


class SampleLogprobs(NamedTuple):
    """Samples and their log-probs, the same on all ranks."""

    samples: list[bytes]
    logprobs: Scores
    """Summed log-probs of their completions, [D, A]."""


class LogprobScorer:
    """Computes sequence log-probs of rows under any parallel layout."""

    def __init__(self, run: RunConfig, built: BuiltModel, ranks: ProcessInfo) -> None:
        self._built, self._ranks = built, ranks
        self._pad_to_multiple_of = LoaderConfig.of(run, ranks.device).pad_to_multiple_of
        self._micro_batch_size = run.train.rows_at_once
        self._replicas = built.dims.num_replicas

    def iter_chunks(self, rows: Iterable[Row]) -> Iterator[SampleLogprobs]:
        """Yield the log-probs chunk by chunk. Collective; all ranks pass the same rows."""
        remaining = iter(rows)
        while chunk := list(
            islice(remaining, self._micro_batch_size * self._replicas * MICRO_BATCHES_PER_CHUNK)
        ):
            yield self._compute(chunk)

    def _compute(self, rows: list[Row]) -> SampleLogprobs:
        self._ranks.heartbeat.set_phase("scoring")
        # A sample that occurs twice is computed twice and has two entries, because the replicas'
        # tables are summed.
        samples: list[bytes] = []
        starts: dict[int, int] = {}  # By identity: rows of two splits have the same numbers.
        for row in rows:
            starts[id(row)] = len(samples)
            samples += _samples(row)
        shape = (len(samples), PER_SAMPLE)
        table = torch.zeros(shape, dtype=torch.float64, device=self._ranks.device)
        groups = self._local_micro_batches(rows)
        collated = collate(groups, pad_to_multiple_of=self._pad_to_multiple_of)
        logprobs = self._built.sequence_logprobs.gather(collated.micro_batches())
        for group, scores_DA in zip(groups, logprobs, strict=True):
            indices = [
                starts[id(row)] + index for row in group for index in range(len(_samples(row)))
            ]
            table[indices] = scores_DA
        index_of = {sample: index for index, sample in enumerate(samples)}
        scores = self._ranks.all_reduce_sum(table).cpu().numpy()
        return SampleLogprobs(list(index_of), scores[list(index_of.values())])

    def _local_micro_batches(self, rows: list[Row]) -> list[list[Row]]:
        lengths, size = [len(row.input_ids) for row in rows], self._micro_batch_size
        count = -(-len(rows) // (size * self._replicas))
        groups = local_micro_batches(self._built, range(len(rows)), lengths, size=size, count=count)
        return [[rows[number] for number in group] for group in groups]


def _samples(row: Row) -> tuple[bytes, ...]:
    assert row.branching is not None
    return row.branching.samples
