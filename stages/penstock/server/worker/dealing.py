"""Samples of clients to micro-batches of replicas.

T tokens of a micro-batch, padding included.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate

import numpy as np
import torch

from penstock.config.run import RunConfig
from penstock.engine.client_losses import NOWHERE, Informed
from penstock.engine.parallel.fits import padding_of
from penstock.engine.parallel.split import takes
from penstock.losses.policy import Told
from penstock.rows.collate import MicroBatch, PadTo, collate
from penstock.rows.reader import Row
from penstock.server.worker.refusals import RefusedError
from penstock.server.worker.samples import Sample


@dataclass(frozen=True)
class Dealing:
    """How rows are laid out over replicas."""

    run: RunConfig
    num_replicas: int
    replica: int
    """This rank's."""
    pin_memory: bool = False

    def deal(self, samples: Sequence[Sample], rows: Sequence[Sequence[int]]) -> list[Informed]:
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
            pad_to_multiple_of=padding_of(self.run.data, self.run.train),
            pad_to=self._pad_to(),
        )
        made = made.pin_memory() if self.pin_memory else made
        return [
            _informed(batch, [samples[each] for each in row], [places[each] for each in row])
            for batch, row in zip(made.micro_batches(), mine, strict=True)
        ]

    def _count(self, num_rows: int) -> int:
        """Micro-batches of each replica: as many as its rows at most, or what a pipeline needs."""
        train, count = self.run.train, max(1, -(-num_rows // self.num_replicas))
        if train.pipeline_parallel_size > 1:
            while not takes(train.pipeline_parallel_schedule, train.pipeline_parallel_size, count):
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
        np.concatenate([sample.targets for sample in samples]),
        np.array([len(sample.tokens) for sample in samples], np.int32),
        number,
    )


def _informed(batch: MicroBatch, samples: Sequence[Sample], places: Sequence[int]) -> Informed:
    size = len(batch.input_ids_T)
    told: dict[str, torch.Tensor] = {}
    for field in fields(Told):
        whole = np.zeros(size, np.float32)
        at = 0
        for sample in samples:
            whole[at : at + len(sample.tokens)] = sample.told[field.name]
            at += len(sample.tokens)
        told[field.name] = torch.from_numpy(whole)
    which = np.full(size, len(samples), np.int64)
    where = np.full(size, NOWHERE, np.int64)
    at = 0
    for number, (sample, place) in enumerate(zip(samples, places, strict=True)):
        count = len(sample.tokens)
        which[at : at + count] = number
        where[at : at + count] = np.arange(place, place + count)
        at += count
    return Informed(
        batch, Told(**told), torch.from_numpy(which), len(samples), torch.from_numpy(where)
    )
