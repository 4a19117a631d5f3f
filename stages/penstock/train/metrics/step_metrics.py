"""Step metrics: phase times, FLOP/s, MFU, memory."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from penstock.config.schema.train import TrainConfig
from penstock.core.machine.device_specs import peak_flops
from penstock.core.machine.linux import peak_memory_bytes
from penstock.engine.build import BuiltModel
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.train_step import StepResult
from penstock.models.flops import Work, step_flops
from penstock.rows.batches import Integers
from penstock.rows.collate import MicroBatch
from penstock.rows.reader import PackedRows
from penstock.train.metrics.loss_spikes import LossSpikeMonitor
from penstock.train.metrics.phase_timer import PhaseTimer

READING_ROWS = "reading rows"
"""The first phase of a step."""


def recovery_times(first_phases: Sequence[tuple[str, float]], now: float) -> dict[str, float]:
    """Resume time: seconds from the start of the process to the end of its first step at `now`, for
    each phase before that step, for the step, and in total.

    `first_phases` are the phases of the process and their start times.
    """
    step = next((begin for phase, begin in first_phases if phase == READING_ROWS), now)
    marks = [
        *((phase, begin) for phase, begin in first_phases if begin < step),
        ("first step", step),
        ("", now),
    ]
    times: dict[str, float] = defaultdict(float)
    for (phase, start), (_, end) in pairwise(marks):
        times[phase.replace(" ", "_")] += end - start
    times["all"] = now - marks[0][1]
    return {phase: round(seconds, 3) for phase, seconds in times.items()}


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
        self._spikes = LossSpikeMonitor(train.log_loss_spikes, ranks)
        self._phases = PhaseTimer(ranks.device) if ranks.is_main_process else None
        # FP8 training is measured against the 16-bit peak, as is usual, and float16 is as fast as
        # bfloat16.
        precision = "fp32" if train.computes_in == "float32" else "bf16"
        self._is_cuda = ranks.device.type == "cuda"
        self._peak_flops = (
            peak_flops(torch.cuda.get_device_name(ranks.device), precision)
            if self._is_cuda
            else None
        )
        self._is_first_after_resume = False
        self._log_recovery = train.log_recovery_timing
        if self._phases:
            ranks.heartbeat.set_listener(self._phases.on_phase)

    def on_resume(self) -> None:
        """The next step is the first one after resuming."""
        self._is_first_after_resume = self._log_recovery

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
        tokens, squares = int(self._lengths[rows].sum()), int(self._squares[rows].sum())
        work = Work.from_totals(self._config, tokens, squares, logits=result.trained_tokens)
        flops = step_flops(self._config, work, learning=self._learning)
        per_second = flops / seconds / self._ranks.world_size
        fields: dict[str, Any] = {
            "tflops": round(per_second / 1e12, 5),
            "mfu": round(per_second / self._peak_flops, 5) if self._peak_flops else None,
            "phases": self._phases.pop_seconds(),
        }
        if self._is_first_after_resume:
            self._is_first_after_resume = False
            first_phases = self._ranks.heartbeat.first_phases
            fields["recovery_seconds"] = recovery_times(first_phases, time.time())
        return fields

    def peak_memory(self) -> int:
        """Peak memory in bytes: of the GPU since the last call, else of the process so far. Encoded
        with the rank in one number, so that one max-reduction gives both."""
        world, device = self._ranks.world_size, self._ranks.device
        if self._is_cuda:
            peak = torch.cuda.max_memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        else:
            peak = peak_memory_bytes()
        return peak * world + world - 1 - self._ranks.rank

    def reserved_memory(self) -> int:
        """Bytes that the GPU's allocator holds, free blocks included; 0 on a CPU."""
        return torch.cuda.memory_reserved(self._ranks.device) if self._is_cuda else 0

    def memory_fields(self, encoded_peak: int, reserved: int) -> dict[str, Any]:
        """The memory fields of a record from the highest `peak_memory`, and its rank if there are
        several, and the highest `reserved_memory`."""
        world = self._ranks.world_size
        used, reversed_rank = divmod(encoded_peak, world)
        rank_field = {"memory_rank": world - 1 - reversed_rank} if world > 1 else {}
        reserved_field = {"memory_reserved_gib": round(reserved / GIB, 4)} if reserved else {}
        return {"memory_gib": round(used / GIB, 4), **reserved_field, **rank_field}

    def close(self) -> None:
        self._ranks.heartbeat.set_listener(None)
