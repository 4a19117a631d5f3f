"""Samples of clients to micro-batches of replicas.

T tokens of a micro-batch, padding included; K targets of a token, in passes of several.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.config.schema.run import RunConfig
from penstock.engine.distributed.pipeline_stages import schedule_accepts
from penstock.engine.distributed.validate_layout import micro_batch_padding
from penstock.engine.losses.client_loss import NOWHERE, LossBatch
from penstock.losses.policy import LossInputs
from penstock.rows.collate import MicroBatch, PadTo, collate
from penstock.rows.reader import Row
from penstock.rows.schema import IGNORED
from penstock.server.worker.datums import Sample
from penstock.server.worker.errors import RefusedError


@dataclass(frozen=True)
class BatchDispatcher:
    """How rows are laid out over replicas."""

    run: RunConfig
    num_replicas: int
    replica: int
    """This rank's."""
    pin_memory: bool = False

    def deal(self, samples: Sequence[Sample], rows: Sequence[Sequence[int]]) -> list[LossBatch]:
        """This replica's micro-batches, one of each of its rows; as many as any other replica has,
        of nothing but padding where there are no more rows.

        Raises RefusedError where rows do not hold every sample once.
        """
        if sorted(number for row in rows for number in row) != list(range(len(samples))):
            raise RefusedError("internal", f"rows do not hold each of {len(samples)} samples once")
        mine = [list(row) for row in rows[self.replica :: self.num_replicas]]
        mine += [[] for _ in range(self._count(len(rows)) - len(mine))]
        places = [0, *accumulate(len(sample.tokens) for sample in samples)]
        made = collate(
            [
                [_row(number, [samples[each] for each in row])] if row else []
                for number, row in enumerate(mine)
            ],
            pad_to_multiple_of=micro_batch_padding(self.run.data, self.run.train),
            pad_to=self._pad_to(),
        )
        made = made.pin_memory() if self.pin_memory else made
        most = max((sample.num_targets for sample in samples), default=1)
        return [
            _informed(batch, [samples[each] for each in row], [places[each] for each in row], most)
            for batch, row in zip(made.micro_batches(), mine, strict=True)
        ]

    def _count(self, num_rows: int) -> int:
        """Micro-batches of each replica: as many as its rows at most, or what a pipeline needs."""
        train, count = self.run.train, max(1, -(-num_rows // self.num_replicas))
        if train.pipeline_parallel_size > 1:
            while not schedule_accepts(
                train.pipeline_parallel_schedule, train.pipeline_parallel_size, count
            ):
                count += 1
        return count

    def _pad_to(self) -> PadTo:
        """The stages of a pipeline pass on micro-batches of one length."""
        if self.run.train.pipeline_parallel_size == 1:
            return "own"
        if self.run.train.pp_variable_seq_lengths:
            return "longest"
        return self.run.data.sample_packing_sequence_len


def _row(number: int, samples: Sequence[Sample]) -> Row:
    return Row(
        np.concatenate([sample.tokens for sample in samples]),
        # A row has one label of each token: where there are more, `_informed` lays them all out.
        np.concatenate(
            [sample.targets.reshape(-1, sample.num_targets)[:, 0] for sample in samples]
        ),
        np.array([len(sample.tokens) for sample in samples], np.int32),
        number,
    )


def _informed(
    batch: MicroBatch, samples: Sequence[Sample], places: Sequence[int], most: int
) -> LossBatch:
    """`most`: K."""
    size = len(batch.input_ids_T)
    told = {
        field.name: _laid(
            [sample.told[field.name] for sample in samples], size, most, np.float32(0)
        )
        for field in fields(LossInputs)
    }
    if most > 1:
        labels_TK = _laid([sample.targets for sample in samples], size, most, np.int64(IGNORED))
        batch = replace(batch, labels_T=labels_TK)
    counts = [len(sample.tokens) for sample in samples]
    which = [np.full(count, number) for number, count in enumerate(counts)]
    where = [np.arange(place, place + count) for place, count in zip(places, counts, strict=True)]
    return LossBatch(
        batch,
        LossInputs(**told),
        _laid(which, size, 1, np.int64(len(samples))),
        len(samples),
        _laid(where, size, 1, np.int64(NOWHERE)),
    )


def _laid(
    parts: Sequence[npt.NDArray[Any]], size: int, most: int, rest: np.generic
) -> torch.Tensor:
    """What is known of the tokens of samples, [T], or of their targets, [T, K], one sample after
    another; `rest` where there is nothing."""
    whole_TK = np.full((size, most), rest)
    at = 0
    for part in parts:
        columns = part if part.ndim > 1 else part[:, None]
        whole_TK[at : at + len(part), : columns.shape[1]] = columns
        at += len(part)
    return torch.from_numpy(whole_TK if most > 1 else whole_TK[:, 0])
