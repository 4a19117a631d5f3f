"""Machines that train together: the first one owns the run's folder, the others lend their ranks.

Only the first holds the folder's lock, claims it and seals it; if all did, each would wait for the
others to be done.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from penstock.config.schema.run import RunConfig
from penstock.core.cache.stage import short, stage_key
from penstock.core.cache.store import Cache, PlannedStage, StageResult, find_cached
from penstock.core.process.scratch_dir import scratch_folder
from penstock.train.launch.job import JOB, Job
from penstock.train.launch.torchrun import LaunchResult, start_ranks


@runtime_checkable
class DistributedStage(Protocol):
    """A stage whose work ranks do."""

    name: ClassVar[str]
    module: ClassVar[str]
    """What a rank is started with."""
    run_config: RunConfig
    ranks: Literal["torchrun", "this_process"]

    def job(self, output_dir: Path) -> Job:
        """What the ranks of this machine are told."""
        ...

    def ending(self, job: Job, ended: LaunchResult, where: str) -> dict[str, Any]:
        """What ranks that came to their end have found; raises what ended them else."""
        ...

    def follow(self, out: Path) -> None:
        """Be a rank that does not lead, in this process."""
        ...


def lends(step: PlannedStage) -> bool:
    """Whether this machine only lends its ranks to the step."""
    stage = step.stage
    return (
        isinstance(stage, DistributedStage)
        and stage.ranks == "torchrun"
        and stage.run_config.launch.node_rank > 0
    )


def run_worker_node(step: PlannedStage, cache: Cache, notify: Callable[[str], None]) -> StageResult:
    """Start this machine's ranks and stay until they end; the first machine seals the result.

    Raises what the stage itself would raise for ranks that did not come to their end.
    """
    stage = step.stage
    assert isinstance(stage, DistributedStage)
    started, key = time.monotonic(), short(stage_key(step.stage))
    if cache == "reuse" and (manifest := find_cached(step)):
        return StageResult(stage.name, key, "cached", step.path, 0.0, manifest["facts"])
    launch = stage.run_config.launch
    notify(
        f"{stage.name}: this is machine {launch.node_rank} of {launch.nnodes}, counted from 0; it "
        f"waits for the first at {launch.rdzv_endpoint}"
    )
    job = stage.job(step.path.resolve())
    # On this machine's own disk: the paths in it may be other ones than on the first.
    with scratch_folder("job") as folder:
        file = folder / JOB
        job.save(file)
        ended = start_ranks(job, file, module=stage.module)
    facts = stage.ending(job, ended, step.where)
    return StageResult(stage.name, key, "ran", step.path, time.monotonic() - started, facts)
