"""Server supervisor: the parent process, which starts all server processes and restarts dead ones.

It does not read their messages; it only polls the health endpoint, and records when it stops
restarting workers.
"""

import http.client
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from filelock import Timeout

from penstock.config.server.config import ServerConfig
from penstock.core import env
from penstock.core.errors import ConfigError, StageError
from penstock.core.file_lock import acquire_lock
from penstock.core.process.rendezvous_endpoint import interface_towards
from penstock.engine.launch.torchrun import RDZV_BACKEND, SHUTDOWN_TIMEOUT
from penstock.server.launch.addresses import in_url, near
from penstock.server.launch.child_process import ManagedProcess
from penstock.server.launch.job import GIVEN_UP
from penstock.server.launch.multi_node import FirstNode, OtherNode
from penstock.server.launch.prepare import LaunchPlan

LOOK_SECONDS = 0.1
HEALTH_SECONDS = 0.5  # Seconds between health checks
# Seconds beyond the ranks' time, after which torchrun's agent kills them, until it is killed.
MARGIN_SECONDS = 4.0
# Seconds beyond the scheduler's time for saving, because it waits for other processes.
ENGINE_MARGIN_SECONDS = 15.0
LEAVING_SECONDS = 10.0  # Seconds for the workers to exit after the scheduler's shutdown message
MACHINES = "machines"  # Coordination folder of the nodes, in the server's folder
STOPPING = (signal.SIGINT, signal.SIGTERM)
# Seconds for the other ranks to exit after one has died; their results are lost anyway.
FAILING_SECONDS = 10.0
DEATHS = "deaths.json"


def managed_processes(prepared: LaunchPlan, log: Callable[[str], None]) -> list[ManagedProcess]:
    """The processes that this launcher starts, in stop order."""
    job, config, secrets = prepared.job, prepared.job.config, prepared.secrets
    processes: list[ManagedProcess] = []
    if prepared.serves:
        for name, package in (("api", "api"), ("engine", "scheduler")):
            module = f"penstock.server.{package}"
            arguments = [str(os.getpid()), name, module, str(prepared.file)]
            command = [sys.executable, "-m", "penstock.server.launch.child_main", *arguments]
            environment = {"PYTHONSAFEPATH": "1", **secrets[name]}
            process = ManagedProcess(name, command, environment, log)
            if name == "engine":
                process.stop_seconds = config.stop_timeout + ENGINE_MARGIN_SECONDS
            processes.append(process)
    if job.mode != "connect":
        arguments = [*torchrun_words(config, job.folder), "-m", "penstock.server.worker"]
        processes.append(
            ManagedProcess(
                "workers",
                [sys.executable, "-m", *arguments, str(prepared.file)],
                {**workers_environment(config), **secrets["workers"]},
                log,
                most_deaths=config.max_restarts,
                stop_seconds=config.stop_timeout + MARGIN_SECONDS,
                pass_env=config.pass_env,
            )
        )
        if config.nnodes > 1:
            node = OtherNode if config.node_rank else FirstNode
            processes[-1].together = node(job.folder / MACHINES)
    return processes


def num_local_workers(config: ServerConfig) -> int:
    """Number of workers on this machine."""
    count = config.num_workers
    return max(1, env.num_gpus()) if count == "auto" else count


def torchrun_words(config: ServerConfig, folder: Path) -> list[str]:
    """The arguments after `python -m`: the agent, which dies with this process, and torchrun's
    options. `folder`: where the agent lists ranks that were killed by a signal."""
    endpoint = ["--nnodes", str(config.nnodes), "--rdzv-backend", RDZV_BACKEND]
    if config.nnodes > 1:
        # Static node ranks, so that rank 0 runs beside the scheduler.
        endpoint += [
            *("--node-rank", str(config.node_rank)),
            *("--rdzv-endpoint", f"{in_url(str(config.master_addr))}:{config.master_port}"),
            *("--rdzv-conf", f"rank={config.node_rank}"),
        ]
    agent = ["penstock.engine.launch.torchrun_agent", str(os.getpid()), str(folder / DEATHS)]
    num_workers = str(num_local_workers(config))
    return [*agent, str(config.stop_timeout), *endpoint, "--nproc-per-node", num_workers]


def workers_environment(config: ServerConfig) -> dict[str, str]:
    """Variables that are set for torchrun and the workers."""
    threads = max(1, env.num_processors() // num_local_workers(config))
    wished = {
        # torchrun would set 1 for several ranks, which leaves cores idle.
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


def serve(prepared: LaunchPlan, log: Callable[[str], None]) -> None:
    """Run the server until it is asked to stop. `log` is called with one line per event. Raises
    StageError if the workers never come up, and ConfigError if another server uses the same
    folder."""
    job = prepared.job
    api = (job.api_host, job.api_port) if prepared.serves else None
    try:
        # Two servers would overwrite each other's state.
        lock = acquire_lock(prepared.lock, timeout=0)
    except Timeout:
        raise ConfigError(
            f"another server has output_dir {job.output_dir}.\n"
            "  Stop it, or write another output_dir."
        ) from None
    with lock:
        prepared.publish()
        given_up = job.folder / GIVEN_UP
        given_up.unlink(missing_ok=True)
        Launcher(managed_processes(prepared, log), log, api, given_up).run()


@dataclass
class Launcher:
    """Monitors the processes until asked to stop."""

    children: Sequence[ManagedProcess]
    log: Callable[[str], None]
    api: tuple[str, int] | None  # Address of the API, if this launcher runs it
    given_up: Path | None = None  # File whose existence means that workers are no longer restarted
    is_ready: bool = False
    _signals: list[int] = field(default_factory=list[int])
    _last_health_check: float = 0.0

    def run(self) -> None:
        """Run all processes until SIGINT or SIGTERM stops them; a second signal kills them."""
        with self._handle_signals():
            try:
                while not self._signals:
                    for child in self.children:
                        child.look()
                    self._check_given_up()
                    self._poll_health()
                    time.sleep(LOOK_SECONDS)
                # Workers that have just started also get the shutdown message.
                self._last_health_check = 0.0
                self._poll_health()
                self.log(f"stopping ({signal.Signals(self._signals[0]).name})")
            finally:
                serving = [child for child in self.children if child.name != "workers"]
                workers = [child for child in self.children if child.name == "workers"]
                # Workers last, because the scheduler still saves.
                self._stop(serving)
                self._wait_for_workers_to_exit(serving, workers)
                self._stop(workers)

    def _stop(self, group: Sequence[ManagedProcess]) -> None:
        # All are asked before any is waited for, so that they end at the same time.
        for child in group:
            child.ask_to_end()
        for child in group:
            child.end(at_once=lambda: len(self._signals) > 1)

    def _wait_for_workers_to_exit(
        self, serving: Sequence[ManagedProcess], workers: Sequence[ManagedProcess]
    ) -> None:
        # After a clean exit of the scheduler, the workers exit themselves, and torchrun would treat
        # a signal as a failure. A scheduler on another machine may still be saving.
        seconds = 0.0
        if self.is_ready and any(child.name == "engine" and child.ended_well for child in serving):
            seconds = LEAVING_SECONDS
        elif any(isinstance(child.together, OtherNode) for child in workers):
            seconds = max(child.stop_seconds for child in workers)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and len(self._signals) < 2:
            if not any(child.is_alive for child in workers):
                return
            time.sleep(LOOK_SECONDS)

    def _check_given_up(self) -> None:
        # Workers that die before they have ever served have a permanent error.
        for child in self.children:
            if child.is_given_up and self.is_ready and self.api is not None:
                if self.given_up is not None and not self.given_up.exists():
                    self.given_up.touch()
            elif child.is_given_up:
                when = "in a row" if self.api is None else "before they could serve"
                raise StageError(
                    f"the {child.name} ended {child.deaths} times {when}.\n"
                    "  Their messages are above."
                )

    def _poll_health(self) -> None:
        now = time.monotonic()
        if self.api is None or self.is_ready or now - self._last_health_check < HEALTH_SECONDS:
            return
        self._last_health_check = now
        host, port = self.api
        if is_server_ready(near(host), port):
            self.is_ready = True
            self.log(f"serving at http://{in_url(near(host))}:{port}")

    @contextmanager
    def _handle_signals(self) -> Generator[None]:
        def note(signum: int, _frame: FrameType | None) -> None:
            # Handled in the loop: a handler may interrupt the start of a process at any point.
            self._signals.append(signum)

        before = [(number, signal.signal(number, note)) for number in STOPPING]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)


def is_server_ready(host: str, port: int) -> bool:
    """Whether the server is ready, including its workers."""
    connection = http.client.HTTPConnection(host, port, timeout=1.0)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        health = json.loads(response.read()) if response.status == 200 else None
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        connection.close()
    return isinstance(health, dict) and health.get("workers", "ready") == "ready"
