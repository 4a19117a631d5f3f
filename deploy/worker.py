"""`worker.py prefect worker start ...`: a worker that does not leave before its runs have saved.

Told to end, Prefect's worker leaves at once; its runs are killed, training in the middle of a step,
and stay `Running` for ever. This process, when it is told to end, holds the worker still, tells
each of its runs to end, waits until they have, and only then ends the worker. Linux only.
Flow runs may not bring job variables that say what is executed (job_variables.py).
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
"""Of <linux/prctl.h>: orphans below this process become its children."""

LOOK_SECONDS = 0.2


def children_of(parent: int) -> list[int]:
    """Processes that another one started and that have not ended."""
    children: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended just now
            # After the name in parentheses, which may hold any character: state and parent.
            state, its_parent = stat.read_text().rpartition(")")[2].split()[:2]
            if int(its_parent) == parent and state != "Z":
                children.append(int(stat.parent.name))
    return children


def main(command: list[str]) -> int:
    """Run a worker. 0 once it has ended because it was told to, else the worker's exit code."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "orphans cannot be adopted")
    if Path(command[0]).name == "prefect":
        command = [sys.executable, str(Path(__file__).with_name("job_variables.py")), *command[1:]]
    worker = subprocess.Popen(command)
    is_stopping = False

    def end(*_: object) -> None:
        nonlocal is_stopping
        is_stopping = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGSTOP)  # else it would kill them, or begin another one
        runs = children_of(worker.pid)
        for run in runs:
            with contextlib.suppress(ProcessLookupError):
                os.kill(run, signal.SIGTERM)
        while children_of(worker.pid):
            time.sleep(LOOK_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            # A process that is held still by SIGSTOP handles no SIGTERM.
            os.kill(worker.pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    code = 1
    while True:
        try:
            # Of any child: adopted orphans would otherwise stay as zombies.
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:  # nothing is left of it
            return 0 if is_stopping else code
        if pid == worker.pid:
            code = os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
