"""Dry runs of a config: one process for each rank that is run, replayed together."""

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from penstock.config.schema.run import RunConfig
from penstock.core import env
from penstock.core.errors import CapabilityError, ConfigError
from penstock.core.machine.device_specs import DEVICES, find_device
from penstock.engine.distributed.device_mesh import AXES
from penstock.engine.distributed.parallel_dims import ParallelDims
from penstock.estimate.dryrun.consistency import mismatched_collectives
from penstock.estimate.dryrun.job import DryRunJob, RankResult
from penstock.estimate.dryrun.summary import DryRun, RankSummary
from penstock.estimate.dryrun.timeline import replay
from penstock.estimate.dryrun.trace import records_from_json

RankChoice = Literal["roles", "all"]

MAX_RANKS = 64
"""Most ranks that `all` runs."""

MESSAGE_LINES = 12
"""Last lines of a process that failed."""


def select_ranks(dims: ParallelDims, choice: RankChoice) -> list[int]:
    """The ranks to run: the first of each pipeline stage, whose shards are the largest, or all."""
    if choice == "all":
        return list(range(dims.world_size))
    # Ranks of one stage do the same work on shards of one size.
    assert AXES[0] == "pipeline"
    ranks_per_stage = dims.world_size // dims.pipeline
    return [stage * ranks_per_stage for stage in range(dims.pipeline)]


def dry_run(
    run: RunConfig,
    hf_config: Mapping[str, Any],
    dims: ParallelDims,
    ranks: Sequence[int],
    *,
    device_name: str,
    local_ranks: int,
) -> DryRun:
    """Run these ranks of a run on a device of this name. `run` has its row length resolved.

    Raises ConfigError for an unknown device, CapabilityError if a rank fails, with what it printed.
    """
    if find_device(device_name) is None:
        raise ConfigError(f"{device_name} is not known; known are {', '.join(sorted(DEVICES))}.")
    with tempfile.TemporaryDirectory(prefix="penstock-dry-run-") as folder:
        jobs = [
            DryRunJob.build(
                run,
                hf_config,
                dims,
                rank=rank,
                device=device_name,
                local_ranks=local_ranks,
                folder=Path(folder),
            )
            for rank in ranks
        ]
        results = run_jobs(jobs)
    return summarize(dims, device_name, results)


def summarize(dims: ParallelDims, device_name: str, results: Sequence[RankResult]) -> DryRun:
    """Replay the ranks together."""
    device = find_device(device_name)
    assert device, device_name
    records = {result.rank: records_from_json(result.records) for result in results}
    timelines = replay(records)
    ranks = [RankSummary(r.rank, r, records[r.rank], timelines[r.rank]) for r in results]
    return DryRun(dims, device_name, device, ranks, tuple(mismatched_collectives(records)))


def run_jobs(jobs: Sequence[DryRunJob]) -> list[RankResult]:
    """Run the jobs in another process; raises CapabilityError if one fails."""
    paths = [Path(job.output).with_suffix(".job") for job in jobs]
    for job, path in zip(jobs, paths, strict=True):
        job.write(path)
    done = subprocess.run(
        [sys.executable, "-m", "penstock.estimate.dryrun", *map(str, paths)],
        check=False,
        capture_output=True,
        text=True,
        # Kernels that are interpreted are not launched.
        # `-m` puts the working folder first on the path: a torch.py there would be imported.
        env=env.child_environment({"TRITON_INTERPRET": "0", "PYTHONSAFEPATH": "1"}),
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()[-MESSAGE_LINES:]
        raise CapabilityError("the dry run failed:\n" + "\n".join(f"  {line}" for line in lines))
    return [RankResult.read(Path(job.output)) for job in jobs]
