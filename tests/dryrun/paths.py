"""What an engine does besides steps, on fake GPUs: `python -m tests.dryrun.paths [PATH JOB]...`.

Each job's faults, with how often, are written to its output.
"""

import faulthandler
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from penstock.core import env
from penstock.core.files import read_json, write_json
from penstock.core.machine.device_specs import find_device
from penstock.estimate.dryrun import fake_cuda
from penstock.estimate.dryrun.job import DryRunJob
from penstock.estimate.dryrun.trace import Trace


def run_paths(steps: Sequence[tuple[str, DryRunJob]]) -> list[Mapping[str, object]]:
    """Take each path on its job's rank, in another process; returns faults and counts."""
    words = []
    for path, job in steps:
        file = Path(job.output).with_suffix(".job")
        job.write(file)
        words += [path, str(file)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.dryrun.paths", *words],
        check=False,
        capture_output=True,
        text=True,
        env=env.child_environment({"TRITON_INTERPRET": "0"}),
    )
    assert not done.returncode, done.stderr[-4000:]
    return [read_json(Path(job.output)) for _, job in steps]


def take(path: str, job: DryRunJob, trace: Trace) -> None:
    """Build the rank and take the path."""
    # Only now: kernels look for CUDA when they are imported.
    from penstock.engine.checkpoint.async_staging import StagingBuffers
    from penstock.engine.checkpoint.checkpoint_manager import CheckpointManager
    from penstock.estimate.dryrun.rank import BuiltRank, build_rank
    from penstock.estimate.dryrun.rows import synthetic_step
    from tests.dryrun.generation import generate
    from tests.dryrun.server import server_step

    def evaluate(rank: BuiltRank) -> None:
        batches = synthetic_step(rank.run, 2)
        kinds = [torch.zeros(len(batch.labels_T), dtype=torch.int64) for batch in batches]
        rank.built.evaluator.counts(batches, kinds, 1)

    def score_completions(rank: BuiltRank) -> None:
        rank.built.sequence_logprobs.gather(synthetic_step(rank.run, 2))

    def save(rank: BuiltRank) -> None:
        # Alone: the plans of several ranks are checked against each other.
        group = dist.group.WORLD
        with tempfile.TemporaryDirectory() as folder:
            manager = CheckpointManager(
                Path(folder), rank.built.train_state, rank.ranks, group=group
            )
            manager.save(1, {"step": 1})
            assert manager.folder_of(1)

    def stage_checkpoint(rank: BuiltRank) -> None:
        # In this thread: a dispatch mode is one thread's.
        rank.built.engine.step(synthetic_step(rank.run, job.micro_batches), 1e-4, 0)
        trace.clear()
        copies = StagingBuffers()
        copies.start()
        boxes = copies.stage(rank.built.train_state.boxes())
        assert all(part.data.device.type == "cpu" for parts in boxes.values() for part in parts)

    paths: Mapping[str, Callable[[BuiltRank], None]] = {
        each.__name__: each
        for each in (evaluate, score_completions, generate, save, stage_checkpoint)
    }
    paths = {**paths, "server_step": partial(server_step, hf_config=job.hf_config)}
    with build_rank(job, trace) as rank:
        trace.clear()
        paths[path](rank)
        write_json(
            Path(job.output),
            {
                "faults": [[*fault, times] for fault, times in trace.faults.items()],
                "launches": len(trace.as_json()),
            },
        )


def main() -> None:
    words = sys.argv[1:]
    faulthandler.enable()
    torch.set_num_threads(1)
    steps = [
        (path, DryRunJob.read(Path(file)))
        for path, file in zip(words[::2], words[1::2], strict=True)
    ]
    trace = Trace()
    name, local_ranks = steps[0][1].device, steps[0][1].local_ranks
    device = find_device(name)
    assert device
    fake_cuda.install(name.lower(), device, trace, local_ranks=local_ranks)
    for path, job in steps:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                take(path, job, trace)
                code = 0
            except BaseException:  # noqa: BLE001 - the edge of the process
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)
        if code := os.waitstatus_to_exitcode(os.wait()[1]):
            os._exit(abs(code))
    os._exit(0)


if __name__ == "__main__":
    main()
