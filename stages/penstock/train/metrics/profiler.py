"""A profile of some steps (`train.enable_profiling`): traces that ui.perfetto.dev opens, and on
GPUs what memory was held for, which pytorch.org/memory_viz opens.

A profile that cannot be taken or written is told in the log, and training goes on.
"""

import gzip
import logging
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from penstock.config.schema.train import TrainConfig
from penstock.core.files import atomic_write, remove
from penstock.engine.distributed.ranks import ProcessInfo

MOST_ALLOCATIONS = 200_000
"""Of those that a snapshot of a GPU's memory remembers, the newest."""

log = logging.getLogger("penstock.train")


class Profile:
    """What one rank records, from `profile_start_step` steps on until `profile_end_step` are done.

    A run that goes on from a later step records nothing.
    """

    def __init__(self, train: TrainConfig, ranks: ProcessInfo, run: str) -> None:
        """`run` begins the names of its files, so that those of several runs lie side by side."""
        self.train, self.ranks, self.run = train, ranks, run
        self.left = train.enable_profiling and (ranks.leads or not train.profile_rank0_only)
        """Whether anything is still to be recorded."""
        self.folder = Path(train.profile_trace_dir)
        self._profile: profile | None = None
        self._first = 0

    @contextmanager
    def step(self, done: int) -> Generator[None]:
        """Around the step that is taken when `done` are done."""
        if self.left and self._profile is None and done >= self.train.profile_start_step:
            self._begin(done)
        if self._profile is None:
            yield
            return
        with record_function(f"step {done + 1}"):
            yield
        if done + 1 >= self.train.profile_end_step:
            self._finish(done + 1)

    def close(self, done: int) -> None:
        """Write what was recorded of a run that ends within the window, after `done` steps."""
        if self._profile is not None:
            self._finish(done)

    def _begin(self, done: int) -> None:
        self.left = False
        if done >= self.train.profile_end_step:
            return
        train = self.train
        activities = [ProfilerActivity.CPU]
        if self._on_cuda:
            activities.append(ProfilerActivity.CUDA)
        recorder = profile(
            activities=activities,
            record_shapes=train.profile_record_shapes,
            profile_memory=train.profile_profile_memory,
            with_stack=train.profile_with_stack,
        )
        try:
            recorder.start()
            if self._records_memory:
                torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
        except RuntimeError as error:
            log.warning("nothing is profiled: %s", error)
            return
        self._profile, self._first = recorder, done + 1

    def _finish(self, done: int) -> None:
        recorder = self._profile
        assert recorder is not None
        self._profile = None
        self.ranks.pulse.begins("writing a profile")
        name = f"{self.run}.steps_{self._first}-{done}.rank_{self.ranks.rank}"
        try:
            recorder.stop()
            with atomic_write(self.folder / f"{name}.pt.trace.json.gz") as part:
                _export(recorder, part)
            if self._records_memory:
                with atomic_write(self.folder / f"{name}.memory.pickle") as part:
                    torch.cuda.memory._dump_snapshot(str(part))
                torch.cuda.memory._record_memory_history(enabled=None)
        except (OSError, RuntimeError) as error:
            log.warning("the profile of steps %d to %d is lost: %s", self._first, done, error)
            return
        log.info("steps %d to %d are profiled in %s", self._first, done, self.folder / name)

    @property
    def _on_cuda(self) -> bool:
        return self.ranks.device.type == "cuda"

    @property
    def _records_memory(self) -> bool:
        return self._on_cuda and self.train.profile_profile_memory


def _export(recorder: profile, target: Path) -> None:
    """The trace, compressed: text of this kind shrinks to a twentieth."""
    plain = target.with_name(f"{target.name}.json")
    try:
        recorder.export_chrome_trace(str(plain))
        with plain.open("rb") as read, gzip.open(target, "wb", compresslevel=3) as write:
            shutil.copyfileobj(read, write, 1 << 20)
    finally:
        remove(plain)
