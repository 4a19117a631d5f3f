"""Runs one rank dry: builds its model on fake CUDA tensors and takes two steps."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from penstock.config.schema.run import RunConfig
from penstock.core.machine.device_specs import find_device
from penstock.core.process.rank_heartbeat import RankStatus
from penstock.dryrun.dispatch import DryRunMode
from penstock.dryrun.holders import Owners
from penstock.dryrun.job import DryRunJob, RankResult
from penstock.dryrun.memory import Peak
from penstock.dryrun.process_group import init_fake_process_group
from penstock.dryrun.roofline import Roofline
from penstock.dryrun.rows import mean_pairs_per_token, synthetic_step
from penstock.dryrun.trace import Trace
from penstock.engine.build import assemble
from penstock.engine.distributed.validate_layout import micro_batch_padding
from penstock.engine.train_step import Prefetch
from penstock.rows.collate import MicroBatch

LARGEST = 12
"""Number of places that are listed."""


def run_rank(job: DryRunJob, trace: Trace) -> RankResult:
    """Build the rank's model and take two steps. `fake_cuda.install` comes first.

    Raises CapabilityError as `assemble` does.
    """
    device = find_device(job.device)
    assert device, job.device
    run = job.run()
    ranks = init_fake_process_group(job.rank, job.world_size, job.local_ranks)
    roofline = Roofline(device, job.local_ranks, mean_pairs_per_token(job.row_length))
    mode = DryRunMode(trace, roofline)
    notes: list[str] = []
    with mode:
        built = assemble(run, dict(job.hf_config), None, ranks, notes.append, load=_load_nothing)
        resident = mode.memory.now
        owners = Owners(built, mode.memory)

        def follow(status: RankStatus) -> None:
            if status.phase == "update" and trace.phase != "update":
                owners.note_gradients()
            trace.phase = status.phase

        ranks.heartbeat.set_listener(follow)
        read = partial(_read_rows, job, run)
        batches, counts = read(0), None
        for step in range(2):
            trace.clear()
            mode.memory.start_step()
            roofline.flops = 0.0
            ranks.heartbeat.set_phase("start", step=step)
            following = partial(Prefetch, read(step + 1), (0, 0))
            counts = built.engine.step(
                batches, 1e-4, step, counts=counts, prefetch=following
            ).next_counts
            batches = following().batches
    peak = mode.memory.peak()
    return RankResult(
        rank=job.rank,
        peak=peak.num_bytes,
        holders={str(holder): size for holder, size in owners.holders(peak).items()},
        resident=resident,
        largest=_largest(peak),
        groups=sorted((group.size() for group in _groups()), reverse=True),
        faults=[[*fault, times] for fault, times in trace.faults.items()],
        records=trace.as_json(),
        flops=roofline.flops,
        notes=notes,
        num_layers=sum(len(part.model.layers) for part in built.engine.model.parts),
        micro_batches=job.micro_batches,
        tokens=sum(batch.num_tokens for batch in batches),
    )


def _read_rows(job: DryRunJob, run: RunConfig, step: int) -> list[MicroBatch]:
    return synthetic_step(
        job.micro_batches,
        run.train.micro_batch_size,
        job.row_length,
        pad_to_multiple_of=micro_batch_padding(run.data, run.train),
        seed=step,
    )


def _load_nothing(*_: Any) -> None:
    """Values do not matter."""


def _largest(peak: Peak) -> Sequence[Sequence[Any]]:
    found: Counter[str] = Counter()
    for _, allocation, num_bytes in peak.live:
        found[allocation.where or f"{allocation.library or 'autograd'} ({allocation.node})"] += (
            num_bytes
        )
    return [[where, size] for where, size in found.most_common(LARGEST)]


def _groups() -> list[dist.ProcessGroup]:
    return list(dist.distributed_c10d._world.pg_map)
