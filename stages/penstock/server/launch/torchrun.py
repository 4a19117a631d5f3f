"""torchrun command line and environment of this machine's workers."""

import math
import os
from pathlib import Path

from penstock.config.server.config import ServerConfig
from penstock.core import env
from penstock.core.process.rendezvous_endpoint import interface_towards
from penstock.engine.launch.torchrun import RDZV_BACKEND, SHUTDOWN_TIMEOUT
from penstock.server.launch.addresses import in_url

FAILING_SECONDS = 10.0
"""Seconds for the other ranks to exit after one has died; their results are lost anyway."""
DEATHS = "deaths.json"


def num_local_workers(config: ServerConfig) -> int:
    """Number of workers on this machine."""
    count = config.num_workers
    return max(1, env.num_gpus()) if count == "auto" else count


def torchrun_words(config: ServerConfig, folder: Path) -> list[str]:
    """The arguments after `python -m`: the agent, which dies with this process, and torchrun's
    options.

    `folder`: where the agent lists ranks that were killed by a signal.
    """
    count = num_local_workers(config)
    common = ["--nproc-per-node", str(count)]
    endpoint = ["--nnodes", str(config.nnodes), "--rdzv-backend", RDZV_BACKEND]
    if config.nnodes > 1:
        # Static node ranks, so that rank 0 runs beside the scheduler.
        endpoint += [
            *("--node-rank", str(config.node_rank)),
            *("--rdzv-endpoint", f"{in_url(str(config.master_addr))}:{config.master_port}"),
            *("--rdzv-conf", f"rank={config.node_rank}"),
        ]
    agent = ["penstock.engine.launch.torchrun_agent", str(os.getpid()), str(folder / DEATHS)]
    return [*agent, str(config.stop_timeout), *endpoint, *common]


def workers_environment(config: ServerConfig) -> dict[str, str]:
    """Variables that are set for torchrun and the workers."""
    threads = max(1, env.num_processors() // num_local_workers(config))
    wished = {
        "OMP_NUM_THREADS": str(threads),
        **env.openmp_waiting(),
        **env.cuda_allocator(),
    }
    if config.nnodes > 1 and (interface := interface_towards(str(config.master_addr))):
        # By default gloo listens on the interface of the host name.
        wished["GLOO_SOCKET_IFNAME"] = interface
    return {
        **env.unless_set(wished),
        SHUTDOWN_TIMEOUT: str(math.ceil(min(FAILING_SECONDS, config.stop_timeout))),
        # Keep our folders off sys.path, so that ranks cannot import them by bare name.
        "PYTHONSAFEPATH": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
    }
