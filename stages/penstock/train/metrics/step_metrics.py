"""Step metrics: phase times, FLOP/s, MFU, memory."""

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from penstock.config.schema.train import TrainConfig
from penstock.core.machine.device_specs import Precision, peak_flops
from penstock.engine.build import BuiltModel
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.train_step import StepResult
from penstock.models.flops import Work, step_flops
from penstock.rows.batches import Integers
from penstock.rows.collate import MicroBatch
from penstock.rows.reader import PackedRows
from penstock.train.metrics.loss_spikes import SpikeWatch
from penstock.train.metrics.phase_timer import Phases

READING_ROWS = "reading rows"
"""The first phase of a step."""


def recovery_times(beginnings: Sequence[tuple[str, float]], now: float) -> dict[str, float]:
    """Resume time: seconds from the start of the process to the end of its first step at `now`, for
    each phase before that step, for the step, and in total.

    `beginnings` are the phases of the process and their start times.
    """
    before = [(phase, at) for phase, at in beginnings if phase != READING_ROWS]
    step = next((at for phase, at in beginnings if phase == READING_ROWS), now)
    marks = [*((phase, at) for phase, at in before if at < step), ("first step", step), ("", now)]
    found: dict[str, float] = defaultdict(float)
    for (phase, start), (_, end) in pairwise(marks):
        found[phase.replace(" ", "_")] += end - start
    found["all"] = now - marks[0][1]
    return {phase: round(seconds, 3) for phase, seconds in found.items()}


GIB = 1 << 30


class StepMetrics:
    """Per-rank metrics, and warnings across ranks. Must be closed after the last step."""

    def __init__(
        self,
        built: BuiltModel,
        rows: PackedRows,
        train: TrainConfig,
        ranks: ProcessInfo,
        warn: Callable[..., None],
    ) -> None:
        """`warn` is called on every rank with warnings; `spike` has the numbers of a loss spike."""
        self._config, self._learning = built.config, built.learning
        self._lengths, self._squares = rows.lengths(), rows.squares()
        self._ranks, self._warn = ranks, warn
        self._spikes = SpikeWatch(train.log_loss_spikes, ranks)
        self._phases = Phases(ranks.device) if ranks.is_main_process else None
        self._peak = device_peak_flops(ranks.device, mfu_precision(train))
        self._recovers = False
        self._tells_recovery = train.log_recovery_timing
        if self._phases:
            ranks.pulse.listen(self._phases.on_phase)

    def on_resume(self) -> None:
        """The next step is the first one after resuming."""
        self._recovers = self._tells_recovery

    def step_fields(
        self, result: StepResult, batches: Sequence[MicroBatch], rows: Integers, seconds: float
    ) -> dict[str, Any]:
        """Additional values of rank 0's step record; `batches` are this rank's micro-batches, and
        `rows` the packed rows of all ranks.

        `tflops` are model FLOP/s per device, without padding and recomputation; `mfu` is their
        fraction of the device's peak, None if the peak is unknown.
        """
        if traced := self._spikes.update(result, batches):
            self._warn(traced.text, spike=traced.spike.as_json())
        if not self._phases:
            return {}
        operations = self._operations(rows, result.trained_tokens)
        per_second = operations / seconds / self._ranks.world_size
        return {
            "tflops": round(per_second / 1e12, 5),
            "mfu": round(per_second / self._peak, 5) if self._peak else None,
            "phases": self._phases.pop_seconds(),
            **self._recovery(),
        }

    def _recovery(self) -> dict[str, Any]:
        if not self._recovers:
            return {}
        self._recovers = False
        return {"recovery_seconds": recovery_times(self._ranks.pulse.beginnings, time.time())}

    def peak_memory(self) -> int:
        """Peak memory in bytes: of the GPU since the last call, else of the process so far. Encoded
        with the rank in one number, so that one max-reduction gives both."""
        world = self._ranks.world_size
        return self._memory() * world + world - 1 - self._ranks.rank

    def memory_fields(self, most: int) -> dict[str, Any]:
        """The memory fields of a record from the highest `memory_here`, and its rank if there are
        several."""
        world = self._ranks.world_size
        used, behind = divmod(most, world)
        whose = {"memory_rank": world - 1 - behind} if world > 1 else {}
        return {"memory_gib": round(used / GIB, 4), **whose}

    def close(self) -> None:
        """Stop the timers."""
        self._ranks.pulse.listen(None)

    def _operations(self, rows: Integers, trained_tokens: int) -> float:
        tokens, squares = int(self._lengths[rows].sum()), int(self._squares[rows].sum())
        work = Work.of_sums(self._config, tokens, squares, logits=trained_tokens)
        return step_flops(self._config, work, learning=self._learning)

    def _memory(self) -> int:
        if self._ranks.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._ranks.device)
            torch.cuda.reset_peak_memory_stats(self._ranks.device)
            return peak
        return peak_resident()


def mfu_precision(train: TrainConfig) -> Precision:
    """The matmul precision for MFU. FP8 training is measured against the 16-bit peak, as is usual,
    and float16 is as fast as bfloat16."""
    return "fp32" if train.computes_in == "float32" else "bf16"


def device_peak_flops(device: torch.device, precision: Precision) -> float | None:
    """Peak FLOP/s of the device; None if unknown."""
    if device.type != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(device), precision)


def peak_resident() -> int:
    """Peak resident memory of this process in bytes."""
    if sys.platform.startswith("linux"):
        # VmHWM covers only this program: getrusage includes the process that started it.
        fields = _status(Path("/proc/self/status"))
        if "VmHWM" in fields:
            return int(fields["VmHWM"].split()[0]) * 1024
    import resource  # noqa: PLC0415 - exists on Unix, including systems without /proc

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(file: Path) -> Mapping[str, str]:
    lines = file.read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
