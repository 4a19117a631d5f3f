"""This rank's micro-batches, step after step: read in this process, or ahead of time by others.

Which rows they hold is decided here, before any process reads them, so that neither the number of
processes nor how far they are ahead changes anything.
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
"""The rows of each micro-batch of a step."""

PRELOADED = __name__
"""Imported once by the process that all loading processes are forked from."""

AHEAD = 2
"""Steps that a loading process keeps ready where null is written, as with PyTorch's own loader."""


@dataclass(frozen=True)
class LoaderConfig:
    """How rows are read."""

    num_workers: int
    """Loading processes; with none, rows are read when they are asked for."""
    steps_ahead: int
    """Steps that each loading process keeps ready."""
    pin_memory: bool
    pad_to_multiple_of: int
    pad_to: PadTo

    @classmethod
    def of(cls, run: RunConfig, device: torch.device) -> "LoaderConfig":
        """What the settings say. Loading processes are started where they are asked for."""
        data = run.data
        asked = {"dataloader_num_workers"} & data.model_fields_set
        if data.dataloader_prefetch_factor is not None:
            asked |= {"dataloader_prefetch_factor"} & data.model_fields_set
        return cls(
            num_workers=data.dataloader_num_workers if asked else 0,
            steps_ahead=data.dataloader_prefetch_factor or AHEAD,
            pin_memory=data.dataloader_pin_memory and device.type == "cuda",
            pad_to_multiple_of=micro_batch_padding(data, run.train),
            pad_to=_pad_to(run),
        )


def _pad_to(run: RunConfig) -> PadTo:
    """The stages of a pipeline pass on micro-batches of one length."""
    if run.train.pipeline_parallel_size == 1:
        return "own"
    if run.train.pp_variable_seq_lengths:
        return "longest"
    return run.data.sample_packing_sequence_len * run.train.micro_batch_size


def trained_rows(job: Job) -> PackedRows:
    """The rows that a run learns from. Samples in one see each other only if that is written."""
    kind = PackedRows if job.config.data.isolate_samples else UnmaskedRows
    return kind(job.packed / "data" / "train")


def prepare(reading: LoaderConfig) -> None:
    """Let the process that loading processes are forked from begin, while others have work."""
    if reading.num_workers:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([PRELOADED])
        forkserver.ensure_running()


def read(rows: PackedRows, groups: Groups, reading: LoaderConfig) -> list[MicroBatch]:
    """The micro-batches of those rows, read in this process."""
    laid = _lay(rows, groups, reading)
    return (laid.pin_memory() if reading.pin_memory else laid).micro_batches()


class Loader:
    """An iterator over the micro-batches of each of `steps`. Close it: it may own processes."""

    def __init__(self, rows: PackedRows, steps: Iterator[Groups], reading: LoaderConfig) -> None:
        """Start to read the steps' rows."""
        self._rows, self._steps, self._reading = rows, steps, reading
        self._ahead: Iterator[CollatedStep | PenstockError] | None = None
        if reading.num_workers:
            prepare(reading)
            self._ahead = iter(
                DataLoader(
                    _Steps(type(rows), rows.folder, reading),
                    sampler=steps,
                    batch_size=None,
                    collate_fn=_as_it_is,
                    num_workers=reading.num_workers,
                    prefetch_factor=reading.steps_ahead,
                    pin_memory=reading.pin_memory,
                    worker_init_fn=_begin,
                    multiprocessing_context="forkserver",
                    # Its own: drawing from the global one would change the run's random numbers.
                    generator=torch.Generator(),
                )
            )

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        return self

    def __next__(self) -> list[MicroBatch]:
        """The next step's micro-batches.

        Raises what went wrong where the rows were read, and StageError if a process that reads
        them is lost.
        """
        if self._ahead is None:
            return read(self._rows, next(self._steps), self._reading)
        try:
            found = next(self._ahead)
        except (RuntimeError, OSError, EOFError) as error:
            # What was raised in a loading process comes with its name and traceback; the rest is
            # about the process itself.
            if str(error).startswith("Caught "):
                raise
            raise StageError(
                f"a process that loads rows is lost: {error or type(error).__name__}\n"
                "  It may have been killed for memory: lower data.dataloader_num_workers "
                f"({self._reading.num_workers}) or data.dataloader_prefetch_factor, or write "
                "dataloader_num_workers: 0."
            ) from error
        if isinstance(found, PenstockError):
            raise found
        return found.micro_batches()

    def close(self) -> None:
        """End the loading processes."""
        self._ahead = None


class _Steps(Dataset[Any]):
    """The steps as a loading process sees them: what it is asked for is the rows themselves."""

    def __init__(self, kind: type[PackedRows], folder: Path, reading: LoaderConfig) -> None:
        self._kind, self._folder, self._reading = kind, folder, reading
        self._rows: PackedRows | None = None

    def __getitem__(self, groups: Groups) -> CollatedStep | PenstockError:
        try:
            # Mapped in the process that reads: a map does not pass from one to another.
            self._rows = self._rows or self._kind(self._folder)
            return _lay(self._rows, groups, self._reading)
        except PenstockError as error:
            # As a value it arrives as it was raised, not wrapped in this process's traceback.
            return error


def _lay(rows: PackedRows, groups: Groups, reading: LoaderConfig) -> CollatedStep:
    return collate(
        [[rows.row(index) for index in group] for group in groups],
        pad_to_multiple_of=reading.pad_to_multiple_of,
        pad_to=reading.pad_to,
    )


def _as_it_is(value: Any) -> Any:
    return value


def _begin(_worker: int) -> None:
    """A loading process's first act. It ends with the rank, whatever ends that, and not before:
    a request to stop reaches all processes, and the rank still finishes and saves its step.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_starter()
