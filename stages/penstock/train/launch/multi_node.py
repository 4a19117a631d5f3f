"""Multi-node training: the first node owns the run folder, the others only run ranks.

Only the first node locks, claims and completes the folder. If all did, they would wait for each
other.
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
    """A stage that runs on ranks."""

    name: ClassVar[str]
    module: ClassVar[str]
    """The module that a rank runs."""
    run_config: RunConfig
    ranks: Literal["torchrun", "this_process"]

    def job(self, output_dir: Path) -> Job:
        """The job file of this node's ranks."""
        ...

    def read_facts(self, job: Job, ended: LaunchResult, location: str) -> dict[str, Any]:
        """Return the facts of ranks that finished; otherwise raise the error that ended them."""
        ...

    def follow(self, out: Path) -> None:
        """Run as a rank other than rank 0, in this process."""
        ...


def is_worker_node(step: PlannedStage) -> bool:
    """Whether this node only runs ranks of the step."""
    stage = step.stage
    return (
        isinstance(stage, DistributedStage)
        and stage.ranks == "torchrun"
        and stage.run_config.launch.node_rank > 0
    )


def run_worker_node(step: PlannedStage, cache: Cache, notify: Callable[[str], None]) -> StageResult:
    """Start this node's ranks and wait for them; the first node completes the result.

    Raises the errors of the stage if the ranks did not finish.
    """
    stage = step.stage
    assert isinstance(stage, DistributedStage)
    started, key = time.monotonic(), short(stage_key(step.stage))
    if cache == "reuse" and (manifest := find_cached(step)):
        return StageResult(stage.name, key, "cached", step.path, 0.0, manifest["facts"])
    launch = stage.run_config.launch
    notify(
        f"{stage.name}: this is node {launch.node_rank} of {launch.nnodes}, counted from 0; it "
        f"waits for node 0 at {launch.rdzv_endpoint}"
    )
    job = stage.job(step.path.resolve())
    # On the local disk: paths in the job may differ from those of the first node.
    with scratch_folder("job") as folder:
        file = folder / JOB
        job.save(file)
        ended = start_ranks(job, file, module=stage.module)
    facts = stage.read_facts(job, ended, step.where)
    return StageResult(stage.name, key, "ran", step.path, time.monotonic() - started, facts)
