"""Torchrun agent that ends when its parent process ends.

`python -m penstock.engine.launch.torchrun_agent PARENT_PID DEATHS.json PATIENCE
TORCHRUN_ARGUMENTS...`

A stop request is forwarded to the ranks, and the agent waits until they have saved, for up to
PATIENCE seconds, so that agents of other machines see it leave with the rest. Torch's own handler
leaves at once: the others would wait minutes for it, and a second request, which is usual where a
scheduler signals every process of a job, would stop the ranks in the middle of their save.
"""

import inspect
import json
import logging
import os
import platform
import signal
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import main

from penstock.core import env
from penstock.core.machine.linux import child_processes
from penstock.core.process.die_with_parent import end_with_parent
from penstock.core.process.scratch_dir import scratch_folder
from penstock.engine.launch.rendezvous import create_handler
from penstock.engine.launch.torchrun import RDZV_BACKEND, SHUTDOWN_TIMEOUT


def _pass_on(signum: int, _frame: FrameType | None) -> None:
    """Ask the ranks to stop; if there are none, exit at once."""

    def give_up(*_: object) -> None:
        raise api.SignalException("the ranks did not end in time", sigval=signal.SIGKILL)

    num_signals = 0
    for pid in child_processes(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
            num_signals += 1
    if not num_signals:
        number = signal.Signals(signum)
        raise api.SignalException(f"asked to end by {number.name}", sigval=number)
    # The first request starts the clock, and later ones do not wind it up again.
    if not signal.getitimer(signal.ITIMER_REAL)[0]:
        signal.signal(signal.SIGALRM, give_up)
        signal.setitimer(signal.ITIMER_REAL, float(sys.argv[3]))


def _tell_deaths(file: Path, failed: ChildFailedError) -> None:
    deaths = [
        {
            "rank": rank,
            "host": platform.node(),
            "pid": failure.pid,
            "signal": -failure.exitcode,
            "time": failure.timestamp,
        }
        for rank, failure in failed.failures.items()
        # Python's exit code of a process that a signal ended is the negative number of the signal.
        if failure.exitcode < 0
    ]
    file.write_text(json.dumps(deaths), encoding="utf-8")


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    # It warns of options that our rendezvous reads.
    logging.getLogger("torch.distributed.run").setLevel(logging.ERROR)
    # It reports failed ranks, which the launcher does itself.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    seconds = env.variable(SHUTDOWN_TIMEOUT)
    if seconds and "shutdown_timeout" not in inspect.signature(LaunchConfig).parameters:
        # Before PyTorch 2.12, which reads the variable, it always waits 30 seconds.
        api.PContext.close.__defaults__ = (None, int(seconds))
    # Torch looks up this handler when it starts ranks.
    api._terminate_process_handler = _pass_on
    with scratch_folder("ranks") as scratch:
        store = scratch / "store"
        store.mkdir()
        rendezvous_handler_registry.register(RDZV_BACKEND, partial(create_handler, folder=store))
        try:
            # Otherwise torch leaves a log folder behind.
            main(["--log-dir", str(scratch / "logs"), *sys.argv[4:]])
        except api.SignalException as stopped:
            # A traceback would not help anyone.
            sys.exit(128 + stopped.sigval)
        except ChildFailedError as failed:
            _tell_deaths(Path(sys.argv[2]), failed)
            sys.exit(1)
