"""Profiler (`train.enable_profiling`): traces for ui.perfetto.dev, and GPU memory snapshots for
pytorch.org/memory_viz.

Errors of the profiler are logged, and training continues.
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

MAX_MEMORY_EVENTS = 200_000
"""Maximum number of allocations in a memory snapshot; the newest are kept."""

log = logging.getLogger("penstock.train")


class StepProfiler:
    """Profiles one rank from step `profile_start_step` to `profile_end_step`.

    A run resumed at a later step records nothing.
    """

    def __init__(self, train: TrainConfig, ranks: ProcessInfo, run: str) -> None:
        """`run` is the prefix of its file names, so that several runs can share a folder."""
        self.train, self.ranks, self.run = train, ranks, run
        self.pending = train.enable_profiling and (
            ranks.is_main_process or not train.profile_rank0_only
        )
        """Whether there is still something to record."""
        self.folder = Path(train.profile_trace_dir)
        self._profile: profile | None = None
        self._first_step = 0

    @contextmanager
    def step(self, done: int) -> Generator[None]:
        """Context manager around the step after `done` completed steps."""
        if self.pending and self._profile is None and done >= self.train.profile_start_step:
            self._start(done)
        if self._profile is None:
            yield
            return
        with record_function(f"step {done + 1}"):
            yield
        if done + 1 >= self.train.profile_end_step:
            self._finish(done + 1)

    def close(self, done: int) -> None:
        """Write the trace if the run ends within the window, after `done` steps."""
        if self._profile is not None:
            self._finish(done)

    def _start(self, done: int) -> None:
        self.pending = False
        if done >= self.train.profile_end_step:
            return
        train = self.train
        activities = [ProfilerActivity.CPU]
        if self._is_cuda:
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
                # PyTorch's documentation of memory snapshots uses these private functions; none are
                # public.
                torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_EVENTS)
        except RuntimeError as error:
            log.warning("the profiler did not start: %s", error)
            return
        self._profile, self._first_step = recorder, done + 1

    def _finish(self, done: int) -> None:
        recorder = self._profile
        assert recorder is not None
        self._profile = None
        self.ranks.heartbeat.set_phase("writing a profile")
        name = f"{self.run}.steps_{self._first_step}-{done}.rank_{self.ranks.rank}"
        try:
            recorder.stop()
            with atomic_write(self.folder / f"{name}.pt.trace.json.gz") as part:
                _export(recorder, part)
            if self._records_memory:
                with atomic_write(self.folder / f"{name}.memory.pickle") as part:
                    torch.cuda.memory._dump_snapshot(str(part))
                torch.cuda.memory._record_memory_history(enabled=None)
        except (OSError, RuntimeError) as error:
            log.warning(
                "no profile of steps %d to %d was written: %s", self._first_step, done, error
            )
            return
        log.info("profile of steps %d to %d: %s", self._first_step, done, self.folder / name)

    @property
    def _is_cuda(self) -> bool:
        return self.ranks.device.type == "cuda"

    @property
    def _records_memory(self) -> bool:
        return self._is_cuda and self.train.profile_profile_memory


def _export(recorder: profile, target: Path) -> None:
    """Write the gzip-compressed trace, a twentieth of the size."""
    plain = target.with_name(f"{target.name}.json")
    try:
        # For a name in .gz torch (2.13) writes the trace to /tmp first, which may be small, and
        # compresses it line by line at zlib's slowest level.
        recorder.export_chrome_trace(str(plain))
        with plain.open("rb") as trace, gzip.open(target, "wb", compresslevel=3) as stream:
            shutil.copyfileobj(trace, stream, 1 << 20)
    finally:
        remove(plain)
