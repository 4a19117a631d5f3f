"""Starting the ranks of a training run with torchrun, and reading how they ended."""

import math
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config.schema.run import RunConfig
from penstock.core import env
from penstock.core.errors import ConfigError, Interrupted
from penstock.core.process.allowed_env import Purpose
from penstock.core.process.rendezvous import (
    PORT,
    interface_towards,
    parse_endpoint,
    rendezvous_address,
)
from penstock.engine.launch.torchrun import RDZV_BACKEND, run_ranks
from penstock.train.launch.job import LOGS, Job, read_outcome
from penstock.train.launch.rank_failures import deaths_file, what_happened

DETERMINISTIC: Mapping[str, str] = {
    "CUDA_LAUNCH_BLOCKING": "1",
    # Of the two values with which cuBLAS gives the same bits, the one with room to be quick.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
"""For ranks that must give the same bits each time."""


@dataclass(frozen=True)
class LaunchResult:
    """How the ranks of this node ended."""

    status: int
    """Torchrun's exit status."""
    hung: str | None = None
    """What was seen of ranks that did not move."""


def start_ranks(job: Job, file: Path, *, module: str = "penstock.train") -> LaunchResult:
    """Run all ranks of this node to their end: `module`, which is told the `file` of the job.

    With `launch.timeout` ranks that hang are killed, and so started again or given up. Raises
    StageError when none begins, and ConfigError if the other machines cannot be met.
    """
    from penstock.train.launch.hang_watchdog import HangWatchdog  # noqa: PLC0415 - a finished run starts nothing

    launch = job.config.launch
    address = (
        rendezvous_address(launch.rdzv_endpoint, launch.node_rank) if launch.rdzv_endpoint else None
    )
    watch = HangWatchdog(job)
    status = run_ranks(
        [*torchrun_arguments(job.config, address), "-m", module, str(file)],
        environment=env.child_environment(
            {
                **env.unless_set(
                    {
                        "OMP_NUM_THREADS": str(threads_per_rank(job.config)),
                        **env.openmp_waiting(),
                        **env.terminal_width(),
                        **gloo_interface(launch.rdzv_endpoint),
                    }
                ),
                **build_environment(job.config),
            },
            secret_purposes(job),
            launch.pass_env,
        ),
        sink=sys.stderr.buffer,
        deaths=deaths_file(job.output_dir / LOGS, job.launch),
        patience=launch.stop_timeout,
        watch=watch,
    )
    return LaunchResult(status, watch.report)


def gloo_interface(endpoint: str | None) -> dict[str, str]:
    """Have gloo listen at the interface by which machines meet, and not at that of the host's name.

    Within one machine ranks choose loopback by themselves.
    """
    interface = interface_towards(parse_endpoint(endpoint)[0]) if endpoint else None
    return {"GLOO_SOCKET_IFNAME": interface} if interface else {}


def secret_purposes(job: Job) -> set[Purpose]:
    """What the ranks of a job need secrets for: what lies behind URLs is here before they start."""
    train = job.config.train
    found: set[Purpose] = set()
    if train.use_wandb is not False:  # unset: where there is a login
        found.add("wandb")
    if train.use_mlflow:
        found.add("mlflow")
    if train.use_trackio:
        found.add("trackio")
    if train.sample_prompts and job.tokenizer and not Path(job.tokenizer).exists():
        found.add("hub")
    return found


def build_environment(run: RunConfig) -> dict[str, str]:
    """What is set for torchrun and the ranks beside what is there."""
    return {
        # Never let a rank import our folders by their bare names.
        "PYTHONSAFEPATH": "1",
        # A store shared by all attempts serves stale addresses to restarted ranks.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
        **written_environment(run),
    }


def written_environment(run: RunConfig) -> dict[str, str]:
    """What the settings say of the ranks' environment, which CUDA reads when it starts."""
    return {**(DETERMINISTIC if run.train.enable_full_determinism else {}), **run.launch.env}


def torchrun_arguments(run: RunConfig, address: str | None = None) -> list[str]:
    """What `launch` means in the words of our agent, which are torchrun's; `address` is this
    node's, as others reach it."""
    launch = run.launch
    words = _common_arguments(run)
    if launch.nnodes == 1 and launch.rdzv_endpoint is None:
        return ["--nnodes", "1", "--rdzv-backend", RDZV_BACKEND, *words]
    return [
        *("--nnodes", str(launch.nnodes)),
        *("--node-rank", str(launch.node_rank)),
        *("--rdzv-backend", RDZV_BACKEND),
        *("--rdzv-endpoint", _endpoint_of(run)),
        *("--rdzv-conf", f"rank={launch.node_rank}"),
        *(("--local-addr", address) if address else ()),
        *words,
    ]


def torchrun_arguments_by_hand(run: RunConfig) -> list[str]:
    """The same for torch's own agent, which does not know our rendezvous.

    Of torch's, `static` is the one that unpickles nothing that comes over the network.
    """
    launch = run.launch
    alone = launch.nnodes == 1 and launch.rdzv_endpoint is None
    host, port = ("127.0.0.1", PORT) if alone else parse_endpoint(_endpoint_of(run))
    return [
        *("--nnodes", str(launch.nnodes)),
        *("--node-rank", str(launch.node_rank)),
        *("--rdzv-backend", "static"),
        *("--master-addr", host),
        *("--master-port", str(port)),
        *_common_arguments(run),
    ]


def _common_arguments(run: RunConfig) -> list[str]:
    patience = str(math.ceil(run.launch.stop_timeout))
    common = ["--nproc-per-node", str(num_local_ranks(run)), "--shutdown-timeout", patience]
    if run.launch.max_restarts:
        common += ["--max-restarts", str(run.launch.max_restarts)]
    return common


def _endpoint_of(run: RunConfig) -> str:
    if run.launch.rdzv_endpoint is None:
        raise ConfigError(
            f"launch.nnodes is {run.launch.nnodes}, and nothing says where they meet.\n"
            "  Write launch.rdzv_endpoint, as host:port of the first node."
        )
    return run.launch.rdzv_endpoint


def num_local_ranks(run: RunConfig) -> int:
    """Processes on this node: as written, else one per GPU, else one."""
    asked = run.launch.nproc_per_node
    return max(1, env.num_gpus()) if asked == "auto" else asked


def threads_per_rank(run: RunConfig) -> int:
    """An even share of the processors; torchrun by itself would leave all but one idle."""
    return max(1, env.num_processors() // num_local_ranks(run))


def read_run_outcome(job: Job) -> dict[str, Any] | None:
    """What the ranks left that this start of them was part of, if they came to an end."""
    outcome = read_outcome(job.output_dir)
    return outcome if outcome and job.launch in outcome["launches"] else None


def build_ending(job: Job, ended: LaunchResult, where: str) -> dict[str, Any]:
    """The facts of a run that is done. Raises Interrupted if it was asked to stop, and saved;
    StageError with the cause if it did not come to an end. `where` is where people look for it.
    """
    outcome = read_run_outcome(job)
    if outcome is None:
        raise what_happened(job.output_dir / LOGS, ended.status, ended.hung)
    if outcome["facts"] is None:
        raise Interrupted(
            f"train was asked to stop and saved step {outcome['step']} in {where}.\n"
            "  Run the same command again to go on from there.",
            signum=outcome["signal"] or signal.SIGTERM,
        )
    return outcome["facts"]
