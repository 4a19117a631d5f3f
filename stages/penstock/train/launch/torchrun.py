"""torchrun launcher: start the ranks of a training run and collect their outcome."""

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
from penstock.core.process.rendezvous_endpoint import (
    PORT,
    interface_towards,
    parse_endpoint,
    rendezvous_address,
)
from penstock.engine.launch.torchrun import RDZV_BACKEND, SHUTDOWN_TIMEOUT, run_ranks
from penstock.train.launch.job import LOGS, Job, read_outcome
from penstock.train.launch.rank_failures import build_error, crash_file

DETERMINISTIC: Mapping[str, str] = {
    "CUDA_LAUNCH_BLOCKING": "1",
    # Both values of this variable are deterministic; this one has the larger, faster workspace.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
"""Environment for deterministic training."""


@dataclass(frozen=True)
class LaunchResult:
    """The outcome of this node's ranks."""

    exit_status: int
    """The exit status of torchrun."""
    hang_report: str | None = None
    """The hang watchdog's report."""


def start_ranks(job: Job, file: Path, *, module: str = "penstock.train") -> LaunchResult:
    """Run all ranks of this node to their end: `module` with the job `file`.

    With `launch.timeout`, hung ranks are killed, and restarted or given up. Raises StageError if no
    rank starts, and ConfigError if the rendezvous with the other nodes fails.
    """
    # Not needed for a finished run.
    from penstock.core.process.byte_stream import byte_stream  # noqa: PLC0415
    from penstock.train.launch.hang_watchdog import HangWatchdog  # noqa: PLC0415

    launch = job.config.launch
    address = (
        rendezvous_address(launch.rdzv_endpoint, launch.node_rank) if launch.rdzv_endpoint else None
    )
    watch = HangWatchdog(job, module)
    status = run_ranks(
        [*torchrun_arguments(job.config, address), "-m", module, str(file)],
        environment=env.child_environment(
            {
                # Values of the user's shell hold for these; those below hold in any case.
                **env.unless_set(
                    {
                        # Where it is unset, torchrun (torch 2.13) gives each of several ranks one.
                        "OMP_NUM_THREADS": str(threads_per_rank(job.config)),
                        **env.openmp_waiting(),
                        **env.cuda_allocator(),
                        **env.host_allocator(),
                        **env.terminal_width(),
                        **gloo_interface(launch.rdzv_endpoint),
                    }
                ),
                **build_environment(job.config),
            },
            secret_purposes(job),
            launch.pass_env,
        ),
        # Ranks print to stderr too: stdout is for the command's JSON object.
        sink=byte_stream(sys.stderr),
        deaths=crash_file(job.output_dir / LOGS, job.launch_id),
        patience=launch.stop_timeout,
        watch=watch,
    )
    return LaunchResult(status, watch.report)


def gloo_interface(endpoint: str | None) -> dict[str, str]:
    """Set GLOO_SOCKET_IFNAME to the interface of the rendezvous instead of the one of the host
    name.

    On a single node, the ranks choose loopback themselves.
    """
    interface = interface_towards(parse_endpoint(endpoint)[0]) if endpoint else None
    return {"GLOO_SOCKET_IFNAME": interface} if interface else {}


def secret_purposes(job: Job) -> set[Purpose]:
    """Purposes for which the ranks need secrets. Remote files are downloaded before they start."""
    train = job.config.train
    purposes: set[Purpose] = set()
    if train.use_wandb is not False:  # Unset means: use W&B if there is a login.
        purposes.add("wandb")
    if train.use_mlflow:
        purposes.add("mlflow")
    if train.use_trackio:
        purposes.add("trackio")
    if train.sample_prompts and job.tokenizer and not Path(job.tokenizer).exists():
        purposes.add("hub")
    return purposes


def build_environment(run: RunConfig) -> dict[str, str]:
    """Variables that are set for torchrun and the ranks."""
    return {
        # Keep our folders off sys.path, so that ranks cannot import them by bare name.
        "PYTHONSAFEPATH": "1",
        # A store shared by all attempts would return stale addresses to restarted ranks.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # An option, --shutdown-timeout, only from PyTorch 2.12 on.
        SHUTDOWN_TIMEOUT: str(math.ceil(run.launch.stop_timeout)),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # tokenizers warns in each process that forks after its threads have been used.
        "TOKENIZERS_PARALLELISM": "false",
        **config_environment(run),
    }


def config_environment(run: RunConfig) -> dict[str, str]:
    """Environment variables from the config, which CUDA reads at startup."""
    return {**(DETERMINISTIC if run.train.enable_full_determinism else {}), **run.launch.env}


def torchrun_arguments(run: RunConfig, address: str | None = None) -> list[str]:
    """The command line of our agent, which uses torchrun's options; `address` is this node's
    address."""
    launch = run.launch
    arguments = _common_arguments(run)
    if launch.nnodes == 1 and launch.rdzv_endpoint is None:
        return ["--nnodes", "1", "--rdzv-backend", RDZV_BACKEND, *arguments]
    return [
        *("--nnodes", str(launch.nnodes)),
        *("--node-rank", str(launch.node_rank)),
        *("--rdzv-backend", RDZV_BACKEND),
        *("--rdzv-endpoint", _require_endpoint(run)),
        # torchrun (torch 2.13) passes --node-rank to a rendezvous named `static` alone.
        *("--rdzv-conf", f"rank={launch.node_rank}"),
        *(("--local-addr", address) if address else ()),
        *arguments,
    ]


def torchrun_arguments_by_hand(run: RunConfig) -> list[str]:
    """The command line of torch's own agent, which does not support our rendezvous.

    Of torch's rendezvous backends, only `static` does not unpickle data from the network.
    """
    launch = run.launch
    alone = launch.nnodes == 1 and launch.rdzv_endpoint is None
    host, port = ("127.0.0.1", PORT) if alone else parse_endpoint(_require_endpoint(run))
    return [
        *("--nnodes", str(launch.nnodes)),
        *("--node-rank", str(launch.node_rank)),
        *("--rdzv-backend", "static"),
        *("--master-addr", host),
        *("--master-port", str(port)),
        *_common_arguments(run),
    ]


def _common_arguments(run: RunConfig) -> list[str]:
    common = ["--nproc-per-node", str(num_local_ranks(run))]
    if run.launch.max_restarts:
        common += ["--max-restarts", str(run.launch.max_restarts)]
    return common


def _require_endpoint(run: RunConfig) -> str:
    if run.launch.rdzv_endpoint is None:
        raise ConfigError(
            f"launch.nnodes is {run.launch.nnodes}, and launch.rdzv_endpoint is not set.\n"
            "  Write launch.rdzv_endpoint, as host:port of the first node."
        )
    return run.launch.rdzv_endpoint


def num_local_ranks(run: RunConfig) -> int:
    """Ranks on this node: as configured, else one per GPU, else one."""
    configured = run.launch.nproc_per_node
    return max(1, env.num_gpus()) if configured == "auto" else configured


def threads_per_rank(run: RunConfig) -> int:
    """OMP threads per rank: an even share of the processors; torchrun's default is 1."""
    return max(1, env.num_processors() // num_local_ranks(run))


def read_launch_outcome(job: Job) -> dict[str, Any] | None:
    """Read the outcome of this start of the ranks, if they finished."""
    outcome = read_outcome(job.output_dir)
    return outcome if outcome and job.launch_id in outcome["launches"] else None


def build_facts(job: Job, ended: LaunchResult, location: str) -> dict[str, Any]:
    """The facts of a finished run. Raises Interrupted if it was asked to stop and saved, and
    StageError with the cause if it failed. `location` is the location shown to users."""
    outcome = read_launch_outcome(job)
    if outcome is None:
        raise build_error(job.output_dir / LOGS, ended.exit_status, ended.hang_report)
    if outcome["facts"] is None:
        raise Interrupted(
            f"train was asked to stop and saved step {outcome['step']} in {location}.\n"
            "  Run the same command again to resume from there.",
            signum=outcome["signal"] or signal.SIGTERM,
        )
    return outcome["facts"]
