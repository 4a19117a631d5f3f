"""Micro-batches from packed client samples. T tokens of a micro-batch, including padding; K targets
per token, in passes with several."""

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
from penstock.engine.losses.client_loss import NO_POSITION, LossBatch
from penstock.losses.policy import LossInputs
from penstock.rows.collate import MicroBatch, PadTo, collate
from penstock.rows.reader import Row
from penstock.rows.schema import IGNORED
from penstock.server.worker.datums import Sample
from penstock.server.worker.errors import CommandError


@dataclass(frozen=True)
class BatchDispatcher:
    """Distributes rows over data-parallel replicas."""

    run: RunConfig
    num_replicas: int
    replica: int  # The replica of this rank
    pin_memory: bool = False

    def build_micro_batches(
        self, samples: Sequence[Sample], rows: Sequence[Sequence[int]]
    ) -> list[LossBatch]:
        """This replica's micro-batches, one per row; every replica has the same number, padded with
        empty ones. Raises CommandError unless the rows contain every sample exactly once."""
        if sorted(number for row in rows for number in row) != list(range(len(samples))):
            raise CommandError("internal", f"rows do not hold each of {len(samples)} samples once")
        own_rows = [list(row) for row in rows[self.replica :: self.num_replicas]]
        own_rows += [[] for _ in range(self._count(len(rows)) - len(own_rows))]
        train = self.run.train
        pad_to: PadTo = "own"
        if train.pipeline_parallel_size > 1:
            # Pipeline stages exchange micro-batches of one length.
            variable = train.pp_variable_seq_lengths
            pad_to = "longest" if variable else self.run.data.row_length
        offsets = [0, *accumulate(len(sample.tokens) for sample in samples)]
        collated = collate(
            [
                [_row(number, [samples[index] for index in row])] if row else []
                for number, row in enumerate(own_rows)
            ],
            pad_to_multiple_of=micro_batch_padding(self.run.data, train),
            pad_to=pad_to,
        )
        collated = collated.pin_memory() if self.pin_memory else collated
        num_targets = max((sample.num_targets for sample in samples), default=1)
        return [
            _build_loss_batch(
                batch,
                [samples[index] for index in row],
                [offsets[index] for index in row],
                num_targets,
            )
            for batch, row in zip(collated.micro_batches(), own_rows, strict=True)
        ]

    def _count(self, num_rows: int) -> int:
        """Micro-batches per replica: its largest number of rows, or the pipeline's minimum."""
        train, count = self.run.train, max(1, -(-num_rows // self.num_replicas))
        if train.pipeline_parallel_size > 1:
            while not schedule_accepts(
                train.pipeline_parallel_schedule, train.pipeline_parallel_size, count
            ):
                count += 1
        return count


def _row(number: int, samples: Sequence[Sample]) -> Row:
    return Row(
        np.concatenate([sample.tokens for sample in samples]),
        # A row has one label per token; with several, `_build_loss_batch` adds them all.
        np.concatenate(
            [sample.targets.reshape(-1, sample.num_targets)[:, 0] for sample in samples]
        ),
        np.array([len(sample.tokens) for sample in samples], np.int32),
        number,
        images=tuple(image for sample in samples for image in sample.images),
    )


def _build_loss_batch(
    batch: MicroBatch, samples: Sequence[Sample], offsets: Sequence[int], num_targets: int
) -> LossBatch:
    """`num_targets`: K, the largest number of targets per token."""
    size = len(batch.input_ids_T)
    loss_inputs = {
        field.name: _concatenate(
            [sample.loss_inputs[field.name] for sample in samples], size, num_targets, np.float32(0)
        )
        for field in fields(LossInputs)
    }
    if num_targets > 1:
        labels_TK = _concatenate(
            [sample.targets for sample in samples], size, num_targets, np.int64(IGNORED)
        )
        batch = replace(batch, labels_T=labels_TK)
    counts = [len(sample.tokens) for sample in samples]
    sample_ids = [np.full(count, number) for number, count in enumerate(counts)]
    positions = [
        np.arange(offset, offset + count) for offset, count in zip(offsets, counts, strict=True)
    ]
    return LossBatch(
        batch,
        LossInputs(**loss_inputs),
        _concatenate(sample_ids, size, 1, np.int64(len(samples))),
        len(samples),
        _concatenate(positions, size, 1, np.int64(NO_POSITION)),
    )


def _concatenate(
    parts: Sequence[npt.NDArray[Any]], size: int, num_targets: int, fill: np.generic
) -> torch.Tensor:
    """Inputs of samples, [T] or [T, K], concatenated; `fill` where there is none."""
    whole_TK = np.full((size, num_targets), fill)
    row = 0
    for part in parts:
        columns = part if part.ndim > 1 else part[:, None]
        whole_TK[row : row + len(part), : columns.shape[1]] = columns
        row += len(part)
    return torch.from_numpy(whole_TK if num_targets > 1 else whole_TK[:, 0])
