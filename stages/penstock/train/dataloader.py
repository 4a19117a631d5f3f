"""Data loader: the micro-batches of this rank, loaded in this process or prefetched by workers.

The rows of each micro-batch are determined here, before any process reads them, so the number of
workers and the prefetch depth do not change the result.
"""

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from penstock.config.schema.run import RunConfig
from penstock.core.errors import PenstockError, StageError
from penstock.core.process.die_with_parent import end_with_starter
from penstock.engine.distributed.validate_layout import micro_batch_padding
from penstock.rows.collate import CollatedStep, MicroBatch, PadTo, collate
from penstock.rows.reader import PackedRows, UnmaskedRows
from penstock.train.launch.job import Job

Groups = Sequence[Sequence[int]]
"""The row indices of each micro-batch of a step."""


@dataclass(frozen=True)
class LoaderConfig:
    """Data loader settings."""

    num_workers: int
    """Number of worker processes; with 0, rows are read on demand in this process."""
    steps_ahead: int
    """Prefetch depth in steps per worker."""
    pin_memory: bool
    pad_to_multiple_of: int
    pad_to: PadTo

    @classmethod
    def of(cls, run: RunConfig, device: torch.device) -> "LoaderConfig":
        """Build from the config. Workers are only started on demand."""
        data, pad_to = run.data, "own"
        if run.train.pipeline_parallel_size > 1:
            # Pipeline stages allocate the buffers that they receive into by one length.
            longest = data.row_length * run.train.rows_at_once
            pad_to = "longest" if run.train.pp_variable_seq_lengths else longest
        return cls(
            num_workers=data.num_workers,
            steps_ahead=data.prefetch_factor,
            pin_memory=data.dataloader_pin_memory and device.type == "cuda",
            pad_to_multiple_of=micro_batch_padding(data, run.train),
            pad_to=pad_to,
        )


def trained_rows(job: Job) -> PackedRows:
    """The training rows. Samples of one row attend to each other only if configured."""
    kind = PackedRows if job.config.data.isolate_samples else UnmaskedRows
    return kind(job.packed_dir / "data" / "train")


def prepare(reading: LoaderConfig) -> None:
    """Start the fork server early, while other processes are busy."""
    if reading.num_workers:
        context = multiprocessing.get_context("forkserver")
        # The fork server imports torch once, and workers are forked with it loaded.
        context.set_forkserver_preload([__name__])
        forkserver.ensure_running()


def read(rows: PackedRows, groups: Groups, reading: LoaderConfig) -> list[MicroBatch]:
    """Read the micro-batches of those rows in this process."""
    collated = _collate(rows, groups, reading)
    return (collated.pin_memory() if reading.pin_memory else collated).micro_batches()


class Loader:
    """Iterator over the micro-batches of `steps`. Must be closed, because it may own workers."""

    def __init__(self, rows: PackedRows, steps: Iterator[Groups], reading: LoaderConfig) -> None:
        self._rows, self._steps, self._reading = rows, steps, reading
        self._ahead: Iterator[CollatedStep | PenstockError] | None = None
        if reading.num_workers:
            prepare(reading)
            self._ahead = iter(
                DataLoader(
                    _Steps(type(rows), rows.folder, reading),
                    sampler=steps,
                    # An index that the sampler gives is a whole step, which DataLoader must not
                    # batch again. Without a batch it converts arrays and collections, and leaves
                    # objects of classes as they are.
                    batch_size=None,
                    num_workers=reading.num_workers,
                    prefetch_factor=reading.steps_ahead,
                    # By a thread of DataLoader (torch 2.13), which calls `pin_memory` of objects
                    # that have such a method.
                    pin_memory=reading.pin_memory,
                    worker_init_fn=_begin,
                    # fork would copy a process with a CUDA context and NCCL's threads, which do not
                    # survive it; spawn would import torch in each worker.
                    multiprocessing_context="forkserver",
                    # A separate generator: drawing from the global one would change the run's RNG
                    # state.
                    generator=torch.Generator(),
                )
            )

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        return self

    def __next__(self) -> list[MicroBatch]:
        """Return the micro-batches of the next step.

        Raises errors of reading rows, and StageError if a worker died.
        """
        if self._ahead is None:
            return read(self._rows, next(self._steps), self._reading)
        try:
            # For a worker that dies, torch's handler of SIGCHLD raises RuntimeError (torch 2.13); a
            # pipe that it leaves behind gives OSError or EOFError.
            collated = next(self._ahead)
        except (RuntimeError, OSError, EOFError) as error:
            # An exception raised in a worker comes with its name and traceback; other RuntimeErrors
            # are about the worker itself.
            if str(error).startswith("Caught "):
                raise
            raise StageError(
                f"a process that loads rows is lost: {error or type(error).__name__}\n"
                "  It may have been killed for memory: lower data.dataloader_num_workers "
                f"({self._reading.num_workers}) or data.dataloader_prefetch_factor, or write "
                "dataloader_num_workers: 0."
            ) from error
        if isinstance(collated, PenstockError):
            raise collated
        return collated.micro_batches()

    def close(self) -> None:
        # DataLoader's iterator ends its workers when it is deleted.
        self._ahead = None


class _Steps(Dataset[Any]):
    """The steps as a worker's Dataset, indexed by the row indices themselves."""

    def __init__(self, kind: type[PackedRows], folder: Path, reading: LoaderConfig) -> None:
        self._kind, self._folder, self._reading = kind, folder, reading
        self._rows: PackedRows | None = None

    def __getitem__(self, groups: Groups) -> CollatedStep | PenstockError:
        try:
            # Memory-mapped in the worker: a memory map cannot be pickled.
            self._rows = self._rows or self._kind(self._folder)
            return _collate(self._rows, groups, self._reading)
        except PenstockError as error:
            # Returned as a value, so that it is not wrapped in the worker's traceback.
            return error


def _collate(rows: PackedRows, groups: Groups, reading: LoaderConfig) -> CollatedStep:
    return collate(
        [[rows.row(index) for index in group] for group in groups],
        pad_to_multiple_of=reading.pad_to_multiple_of,
        pad_to=reading.pad_to,
    )


def _begin(_worker: int) -> None:
    # A stop signal to the whole process group must not end the worker: the rank still finishes its
    # step and saves. The worker ends with the rank.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_starter()
