"""`python -m penstock.estimate.dryrun JOB...`: dry runs of ranks on one kind of device.

Each rank runs in a fork, so that the imports are paid for once.
"""

import faulthandler
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from penstock.core import env
from penstock.core.errors import PenstockError
from penstock.core.machine.device_specs import find_device
from penstock.estimate.dryrun import fake_cuda
from penstock.estimate.dryrun.job import DryRunJob
from penstock.estimate.dryrun.trace import Trace


def main(paths: Sequence[Path]) -> int:
    """Run the jobs, as many at once as there are processors; returns the first exit code that is
    not 0."""
    jobs = [DryRunJob.read(path) for path in paths]
    [(name, local_ranks)] = {(job.device, job.local_ranks) for job in jobs}
    device = find_device(name)
    assert device, name
    trace = Trace()
    # A forked child has none of the threads of OpenMP's pool, and would wait for them.
    torch.set_num_threads(1)
    fake_cuda.install(name.lower(), device, trace, local_ranks=local_ranks)
    # Only now: kernels look for CUDA when they are imported.
    from penstock.estimate.dryrun.rank import run_rank

    running: set[int] = set()
    for job in jobs:
        if len(running) >= env.num_processors() and (code := _wait(running)):
            return code
        pid = os.fork()
        if not pid:
            faulthandler.enable()
            _exit(_run(lambda job=job: run_rank(job, trace).write(Path(job.output))))
        running.add(pid)
    while running:
        if code := _wait(running):
            return code
    return 0


def _run(work: Callable[[], None]) -> int:
    try:
        work()
    except PenstockError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except Exception:  # noqa: BLE001 - the edge of the process
        sys.stderr.write(traceback.format_exc())
        return 1
    return 0


def _wait(running: set[int]) -> int:
    """Wait for one of these processes; returns its exit code, 128 and more for a signal."""
    pid, status = os.wait()
    running.discard(pid)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _exit(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    # PyTorch cannot shut down with a device that is not there.
    os._exit(code)


if __name__ == "__main__":
    _exit(main([Path(path) for path in sys.argv[1:]]))
