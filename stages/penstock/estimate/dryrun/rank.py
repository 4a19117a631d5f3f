"""Runs one rank dry: builds its model on fake CUDA tensors and takes two steps."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from penstock.config.schema.run import RunConfig
from penstock.core.machine.device_specs import find_device
from penstock.core.process.rank_heartbeat import RankStatus
from penstock.engine.build import BuiltModel, assemble
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.train_step import Prefetch
from penstock.estimate.dryrun.dispatch import DryRunMode
from penstock.estimate.dryrun.holders import Owners
from penstock.estimate.dryrun.job import DryRunJob, RankResult
from penstock.estimate.dryrun.memory import Peak
from penstock.estimate.dryrun.process_group import init_fake_process_group
from penstock.estimate.dryrun.roofline import Roofline
from penstock.estimate.dryrun.rows import document_lengths, reference_log_probs, synthetic_step
from penstock.estimate.dryrun.trace import Trace

LARGEST = 12
"""Number of places that are listed."""


@dataclass(frozen=True)
class BuiltRank:
    """A rank's model on fake CUDA tensors."""

    run: RunConfig
    mode: DryRunMode
    ranks: ProcessInfo
    built: BuiltModel
    notes: Sequence[str]
    """What the engine reported while it built the model."""


@contextmanager
def build_rank(job: DryRunJob, trace: Trace) -> Iterator[BuiltRank]:
    """Build the rank's model; within the context it runs. `fake_cuda.install` comes first.

    Raises CapabilityError as `assemble` does.
    """
    device = find_device(job.device)
    assert device, job.device
    run = job.run()
    ranks = init_fake_process_group(job.rank, job.world_size, job.local_ranks)
    documents = job.documents or document_lengths(job.row_length)
    roofline = Roofline(device, job.local_ranks, documents)
    notes: list[str] = []
    with DryRunMode(trace, roofline) as mode:
        built = assemble(run, dict(job.hf_config), None, ranks, notes.append, load=_load_nothing)
        yield BuiltRank(run, mode, ranks, built, notes)


def run_rank(job: DryRunJob, trace: Trace) -> RankResult:
    """Build the rank's model and take two steps; see `build_rank`."""
    with build_rank(job, trace) as rank:
        return _take_steps(job, trace, rank)


def _take_steps(job: DryRunJob, trace: Trace, rank: BuiltRank) -> RankResult:
    run, built, memory = rank.run, rank.built, rank.mode.memory
    resident = memory.now
    owners = Owners(built, memory)

    def follow(status: RankStatus) -> None:
        if status.phase == "update" and trace.phase != "update":
            owners.note_gradients()
        trace.phase = status.phase

    rank.ranks.heartbeat.set_listener(follow)
    read = partial(synthetic_step, run, job.micro_batches)
    batches, counts = read(seed=0), None
    # Two: the first one allocates optimizer states, so that its peak is another.
    for step in range(2):
        trace.clear()
        memory.start_step()
        rank.mode.roofline.flops = 0.0
        rank.ranks.heartbeat.set_phase("start", step=step)
        references = [reference_log_probs(run, batch) for batch in batches]
        following = partial(Prefetch, read(seed=step + 1), (0, 0))
        counts = built.engine.step(
            batches,
            1e-4,
            step,
            [reference for reference in references if reference is not None],
            counts=counts,
            prefetch=following,
        ).next_counts
        batches = following().batches
    peak = memory.peak()
    return RankResult(
        rank=job.rank,
        peak=peak.num_bytes,
        holders={str(holder): size for holder, size in owners.holders(peak).items()},
        resident=resident,
        largest=_largest(peak),
        groups=sorted((group.size() for group in _groups()), reverse=True),
        faults=[[*fault, times] for fault, times in trace.faults.items()],
        records=trace.as_json(),
        flops=rank.mode.roofline.flops,
        notes=rank.notes,
        num_layers=sum(len(part.blocks) for part in built.engine.model.parts),
        micro_batches=job.micro_batches,
        tokens=sum(batch.num_tokens for batch in batches),
    )


def _load_nothing(*_: Any) -> None:
    """Values do not matter."""


def _largest(peak: Peak) -> Sequence[Sequence[Any]]:
    bytes_by_location: Counter[str] = Counter()
    for _, allocation, num_bytes in peak.live:
        bytes_by_location[
            allocation.call_site or f"{allocation.library or 'autograd'} ({allocation.node})"
        ] += num_bytes
    return [[location, size] for location, size in bytes_by_location.most_common(LARGEST)]


def _groups() -> list[dist.ProcessGroup]:
    return list(dist.distributed_c10d._world.pg_map)
