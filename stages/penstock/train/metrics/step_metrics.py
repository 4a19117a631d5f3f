"""What is measured of a step besides what it learnt: phases, operations per second, memory."""

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
"""What a step begins with."""


def recovery_times(beginnings: Sequence[tuple[str, float]], now: float) -> dict[str, float]:
    """Seconds from the start of the process to the end of its first step, which is `now`: of each
    phase before that step, of the step, and of all.

    `beginnings` are the phases of the process with the times at which they began.
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
    """What one rank measures, and what all ranks look out for together. Close it when no more steps
    come."""

    def __init__(
        self,
        built: BuiltModel,
        rows: PackedRows,
        train: TrainConfig,
        ranks: ProcessInfo,
        warn: Callable[..., None],
    ) -> None:
        """`warn` is called on every rank with what people should look at, and, as `spike`, with its
        numbers."""
        self._config, self._learning = built.config, built.learning
        self._lengths, self._squares = rows.lengths(), rows.squares()
        self._ranks, self._warn = ranks, warn
        self._spikes = SpikeWatch(train.log_loss_spikes, ranks)
        self._phases = Phases(ranks.device) if ranks.leads else None
        self._peak = device_peak_flops(ranks.device, mfu_precision(train))
        self._recovers = False
        self._tells_recovery = train.log_recovery_timing
        if self._phases:
            ranks.pulse.listen(self._phases.hear)

    def goes_on(self) -> None:
        """The next step is the first of a run that goes on from a checkpoint of its own."""
        self._recovers = self._tells_recovery

    def of_step(
        self, result: StepResult, batches: Sequence[MicroBatch], rows: Integers, seconds: float
    ) -> dict[str, Any]:
        """What the leading rank's record tells besides of a step, whose micro-batches on this rank
        are `batches`, and on all ranks together the packed `rows`.

        `tflops` are operations that the model's mathematics asks for, padding and what is computed
        a second time left out, per second and device; `mfu` is their share of what the device can
        do at best, None where nobody knows that.
        """
        if traced := self._spikes.see(result, batches):
            self._warn(traced.text, spike=traced.spike.as_json())
        if not self._phases:
            return {}
        operations = self._operations(rows, result.trained_tokens)
        per_second = operations / seconds / self._ranks.world
        return {
            "tflops": round(per_second / 1e12, 5),
            "mfu": round(per_second / self._peak, 5) if self._peak else None,
            "phases": self._phases.take(),
            **self._recovery(),
        }

    def _recovery(self) -> dict[str, Any]:
        if not self._recovers:
            return {}
        self._recovers = False
        return {"recovery_seconds": recovery_times(self._ranks.pulse.beginnings, time.time())}

    def memory_here(self) -> int:
        """Bytes at most in use: on this rank's GPU since this was last asked, else by its process
        so far. In one number with whose they are, so that the highest of any rank tells both."""
        world = self._ranks.world
        return self._memory() * world + world - 1 - self._ranks.rank

    def of_memory(self, most: int) -> dict[str, Any]:
        """What a record tells of the highest `memory_here`, and of several ranks whose it is."""
        world = self._ranks.world
        used, behind = divmod(most, world)
        whose = {"memory_rank": world - 1 - behind} if world > 1 else {}
        return {"memory_gib": round(used / GIB, 4), **whose}

    def close(self) -> None:
        """Take no more time."""
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
    """What most products are computed in; those of 8 bits are measured against 16, as others do,
    and float16 is as fast as bfloat16."""
    return "fp32" if train.computes_in == "float32" else "bf16"


def device_peak_flops(device: torch.device, precision: Precision) -> float | None:
    """Operations per second that the device does at best; None where nobody knows."""
    if device.type != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(device), precision)


def peak_resident() -> int:
    """Bytes of memory that this process has had at once."""
    if sys.platform.startswith("linux"):
        # Of this program alone: the kernel's other count begins with the one that started it.
        fields = _status(Path("/proc/self/status"))
        if "VmHWM" in fields:
            return int(fields["VmHWM"].split()[0]) * 1024
    import resource  # noqa: PLC0415 - systems that have no /proc have it, and others lack it

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(file: Path) -> Mapping[str, str]:
    lines = file.read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
