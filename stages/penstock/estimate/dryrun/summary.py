"""What a dry run found: memory, launches, syncs, communication and time, by rank and in all."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from penstock.core.machine.device_specs import Device
from penstock.engine.distributed.parallel_dims import ParallelDims
from penstock.estimate.costs.estimate import USABLE_MEMORY
from penstock.estimate.dryrun.job import RankResult
from penstock.estimate.dryrun.timeline import Timeline
from penstock.estimate.dryrun.trace import Collective, HostSync, Launch, Record

UseKey = tuple[str, int, str, str, str]
"""The first fields of a `CollectiveUse`, up to the call site."""


@dataclass(frozen=True)
class CollectiveUse:
    """Collectives of one kind, group and dtype at one place."""

    name: str
    group_size: int
    dtype: str
    phase: str
    call_site: str
    times: int
    num_bytes: int
    exposed_seconds: float
    exposed_bytes: int
    """Bytes of those that the device waits for."""

    def as_json(self) -> dict[str, Any]:
        """Plain values; the call site is `where`, as in every other list of a dry run."""
        fields = asdict(self)
        return {"where" if name == "call_site" else name: fields[name] for name in fields}


def _use_key(record: Collective) -> UseKey:
    return record.name, len(record.ranks), record.dtype, record.phase, record.call_site


@dataclass(frozen=True)
class RankSummary:
    """One rank's step on the named machine."""

    rank: int
    result: RankResult
    records: Sequence[Record]
    timeline: Timeline

    @property
    def launches(self) -> int:
        """Kernels of a step."""
        return sum(isinstance(r, Launch) and r.kind != "copy" for r in self.records)

    @property
    def copies(self) -> Counter[tuple[str, str]]:
        """Copies between host and device by (direction, place)."""
        copies = (r for r in self.records if isinstance(r, Launch) and r.kind == "copy")
        return Counter((r.name, r.call_site) for r in copies)

    @property
    def syncs(self) -> Counter[tuple[str, str, str]]:
        """Host syncs by (what, phase, place)."""
        syncs = (r for r in self.records if isinstance(r, HostSync))
        return Counter((r.call, r.phase, r.call_site) for r in syncs)

    @property
    def syncs_in_micro_batches(self) -> int:
        """Host syncs in forward and backward passes."""
        return sum(
            times for (_, phase, _), times in self.syncs.items() if phase in ("forward", "backward")
        )

    @property
    def launches_per_layer(self) -> float | None:
        """Kernels of the forward and backward passes for each layer and micro-batch; those of the
        embedding and the loss count as well."""
        count = sum(
            isinstance(r, Launch) and r.kind != "copy" and r.phase in ("forward", "backward")
            for r in self.records
        )
        layers = self.result.num_layers
        return count / layers / self.result.micro_batches if layers else None

    @property
    def seconds_by_class(self) -> dict[str, float]:
        """Seconds of kernels by class of operators; those with most first."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for record in self.records:
            if isinstance(record, Launch) and record.operators:
                seconds[record.operators] += record.seconds
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))

    def collectives(self) -> list[CollectiveUse]:
        """Collectives by kind, group, dtype and place; those with most bytes first."""
        times: Counter[UseKey] = Counter()
        sizes: Counter[UseKey] = Counter()
        seconds: defaultdict[UseKey, float] = defaultdict(float)
        exposed: Counter[UseKey] = Counter()
        for record in self.records:
            if isinstance(record, Collective):
                times[_use_key(record)] += 1
                sizes[_use_key(record)] += record.num_bytes
        for record, waited in self.timeline.exposed:
            seconds[_use_key(record)] += waited
            exposed[_use_key(record)] += record.num_bytes
        collectives = [CollectiveUse(*k, times[k], sizes[k], seconds[k], exposed[k]) for k in times]
        return sorted(collectives, key=lambda use: -use.num_bytes)

    def as_json(self) -> dict[str, Any]:
        """Plain values: bytes, seconds, counts."""
        result = self.result
        return {
            "rank": self.rank,
            "memory": result.peak,
            "memory_at_rest": result.resident,
            "holders": dict(result.holders),
            "largest": [{"where": location, "bytes": size} for location, size in result.largest],
            "process_groups": list(result.groups),
            "seconds": self.timeline.seconds,
            "compute_seconds": self.timeline.compute_seconds,
            "seconds_by_class": self.seconds_by_class,
            "exposed_seconds": self.timeline.exposed_seconds,
            "host_seconds": self.timeline.host_bound,
            "launches": self.launches,
            "launches_per_layer": self.launches_per_layer,
            "syncs": [
                {"sync": call, "phase": phase, "where": location, "times": times}
                for (call, phase, location), times in self.syncs.items()
            ],
            "copies": [
                {"copy": call, "where": location, "times": times}
                for (call, location), times in self.copies.items()
            ],
            "collectives": [use.as_json() for use in self.collectives()],
            "notes": list(result.notes),
        }


@dataclass(frozen=True)
class DryRun:
    """A step of a layout on a machine, as its ranks' dry runs show it."""

    dims: ParallelDims
    device_name: str
    device: Device
    ranks: Sequence[RankSummary]
    mismatches: Sequence[str] = ()
    """Collectives that would hang: see `consistency.py`."""

    @property
    def peak(self) -> int:
        """Peak bytes of the rank with the highest peak."""
        return max(rank.result.peak for rank in self.ranks)

    @property
    def fits(self) -> bool:
        """Whether every rank's peak fits the device."""
        return self.peak <= USABLE_MEMORY * self.device.memory

    @property
    def seconds(self) -> float:
        """Time of a step."""
        return max(rank.timeline.seconds for rank in self.ranks)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all replicas per second."""
        return self.ranks[0].result.tokens * self.dims.num_replicas / self.seconds

    @property
    def bubble(self) -> float | None:
        """Share of a step for which the ranks of a pipeline run no kernel, on average; None without
        a pipeline."""
        if self.dims.pipeline == 1:
            return None
        idle = [1 - rank.timeline.compute_seconds / self.seconds for rank in self.ranks]
        return sum(idle) / len(idle)

    @property
    def mfu(self) -> float | None:
        """FLOPs of the kernels (recomputation included) over the data sheet's peak in bf16."""
        if not self.device.bf16:
            return None
        done = sum(rank.result.flops for rank in self.ranks) / len(self.ranks)
        return done / self.seconds / self.device.bf16

    @property
    def limits(self) -> Mapping[str, float]:
        """Shares of the step of the slowest rank by what limits it."""
        slowest = max(self.ranks, key=lambda rank: rank.timeline.seconds).timeline
        shares = {
            "compute": slowest.compute_seconds / slowest.seconds,
            "exposed communication": slowest.exposed_seconds / slowest.seconds,
            "host": slowest.host_bound / slowest.seconds,
        }
        return {**shares, "waiting": max(0.0, 1 - sum(shares.values()))}

    @property
    def faults(self) -> Counter[tuple[str, str]]:
        """Faults of all ranks by (fault, place)."""
        counts: Counter[tuple[str, str]] = Counter()
        for rank in self.ranks:
            for fault, location, times in rank.result.faults:
                counts[fault, location] += times
        return counts + Counter((mismatch, "") for mismatch in dict.fromkeys(self.mismatches))

    def as_json(self) -> dict[str, Any]:
        """Plain values: bytes, seconds, counts."""
        return {
            "device": self.device_name,
            "layout": asdict(self.dims),
            "memory": self.peak,
            "device_memory": self.device.memory,
            "fits": self.fits,
            "seconds_per_step": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "bubble": self.bubble,
            "limits": dict(self.limits),
            "faults": [
                {"fault": fault, "where": location, "times": times}
                for (fault, location), times in self.faults.items()
            ],
            "ranks": [rank.as_json() for rank in self.ranks],
        }
