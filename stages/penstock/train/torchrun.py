"""Starting the ranks of a training run with torchrun, and reading how they ended."""

import sys
import time
from pathlib import Path
from typing import Any

from penstock.config.run import RunConfig
from penstock.core import env
from penstock.core.errors import CapabilityError, ConfigError, StageError
from penstock.core.files import read_json
from penstock.core.launch import run_ranks
from penstock.train.job import LOGS, METRICS, OUTCOME, Job


def start_ranks(job: Job, file: Path) -> int:
    """Run all ranks of this node to their end and return torchrun's exit status.

    Raises StageError when no step ends for `launch.timeout` seconds.
    """
    launch = job.config.launch
    environment = {
        # Never let a rank import our folders by their bare names.
        "PYTHONSAFEPATH": "1",
        # A store shared by all attempts serves stale addresses to restarted ranks.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
        **env.unless_set({"OMP_NUM_THREADS": str(threads_per_rank(job.config))}),
        **launch.env,
    }
    started = time.monotonic()
    progress = _Progress(job.output_dir / METRICS)

    def stalled() -> str | None:
        limit = launch.timeout
        if limit is None or progress.idle_seconds(started) < limit:
            return None
        return (
            f"no step ended for {limit:g} s (launch.timeout).\n"
            f"  See {job.output_dir / LOGS}, and raise launch.timeout if a step may take longer."
        )

    return run_ranks(
        [*torchrun_arguments(job), "-m", "penstock.train", str(file)],
        environment=environment,
        sink=sys.stderr.buffer,
        stalled=stalled,
    )


def torchrun_arguments(job: Job) -> list[str]:
    """What `launch` means in torchrun's words."""
    launch = job.config.launch
    grace = ["--shutdown-timeout", "75"]
    common = ["--nproc-per-node", str(num_local_ranks(job.config)), *grace]
    if launch.max_restarts:
        common += ["--max-restarts", str(launch.max_restarts)]
    if launch.nnodes == 1 and launch.rdzv_endpoint is None:
        return ["--standalone", *common]
    if launch.rdzv_endpoint is None:
        raise ConfigError(
            f"launch.nnodes is {launch.nnodes}, and nothing says where they meet.\n"
            "  Write launch.rdzv_endpoint, as host:port of the first node."
        )
    return [
        *("--nnodes", str(launch.nnodes)),
        *("--node-rank", str(launch.node_rank)),
        *("--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", launch.rdzv_endpoint),
        # Told outright: guessing the host by name fails in containers and clouds.
        *("--rdzv-conf", f"is_host={'true' if launch.node_rank == 0 else 'false'}"),
        *common,
    ]


def num_local_ranks(run: RunConfig) -> int:
    """Processes on this node: as written, else one per GPU, else one."""
    asked = run.launch.nproc_per_node
    return max(1, env.num_gpus()) if asked == "auto" else asked


def threads_per_rank(run: RunConfig) -> int:
    """An even share of the processors; torchrun by itself would leave all but one idle."""
    return max(1, env.num_processors() // num_local_ranks(run))


class _Progress:
    """When the run last ended a step, seen from outside."""

    def __init__(self, metrics: Path) -> None:
        self._metrics = metrics
        self._seen: int = -1
        self._since = time.monotonic()

    def idle_seconds(self, started: float) -> float:
        size = self._metrics.stat().st_size if self._metrics.is_file() else 0
        if size != self._seen:
            self._seen, self._since = size, time.monotonic()
        return time.monotonic() - max(self._since, started)


def first_failure(logs: Path, status: int) -> StageError:
    """The earliest error any rank left; later ones are mostly lost connections to the first."""
    records = sorted((read_json(p) for p in logs.glob("failure_*.json")), key=lambda r: r["time"])
    if not records:
        return StageError(
            f"a training process died without a word (torchrun's exit status {status}).\n"
            f"  It may have been killed for memory; see {logs}."
        )
    first = next((r for r in records if r["message"]), records[0])
    text = first["message"] or f"rank {first['rank']}: {first['error']}"
    log = logs / f"rank_{first['rank']}.log"
    failure = StageError(f"{text}\n  The traceback is in {log}.")
    if first["exit_code"] == CapabilityError.exit_code:
        failure.exit_code = first["exit_code"]
    return failure


def outcome_of(job: Job) -> dict[str, Any] | None:
    """What this start of the ranks left, if they came to an end."""
    file = job.output_dir / OUTCOME
    outcome = read_json(file) if file.is_file() else None
    return outcome if outcome and outcome["launch"] == job.launch else None
