"""How long training stands still for a checkpoint: `python -m tests.bench.artifacts.bench_save
[MILLIONS]`.

A model of so many million parameters (100) in fp32 with AdamW's two states, on one process of one
thread, as ranks beside others are. Steps on 128 tokens without a save, with one that waits for the
disk, and with one that is written behind training take turns, each with the save before it over and
its bytes on the disk. Counted is the save together with the step after it. Where other work keeps
the machine busy, a second thread costs the first one turns; so the same is told without the time
that training waits for a processor, which Linux counts. Each save is compared with the step without
one in its own round, so that a machine that becomes slower takes no side. The first round, which
makes memory for copies, is not counted. Medians of five.
"""

import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from penstock.engine.checkpoint.checkpoint_manager import CheckpointManager
from penstock.engine.checkpoint.train_state import TrainState
from penstock.engine.distributed.param_shards import full_shard, make_local_param
from penstock.engine.distributed.ranks import destroy_process_group, init_process_group

REPEATS = 5
WIDTH = 2048
TOKENS = 128
GOAL = 0.1


class Training:
    """Square matrices one after another, which learn to do nothing."""

    def __init__(self, millions: int) -> None:
        count = max(1, round(millions * 1e6 / WIDTH**2))
        self.matrices = [nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5) for _ in range(count)]
        held = [
            make_local_param(f"{number}.weight", one, (full_shard(f"{number}.weight", one.shape),))
            for number, one in enumerate(self.matrices)
        ]
        self.optimizer = torch.optim.AdamW(self.matrices, foreach=False)
        self.trained = TrainState(held, self.optimizer, only_trained=False)
        self.input_TD = torch.randn(TOKENS, WIDTH)

    def step(self) -> None:
        """Forward, backward and update, as an engine's step has them."""
        hidden_TD = self.input_TD
        for matrix in self.matrices:
            hidden_TD = torch.tanh(hidden_TD @ matrix)
        (hidden_TD - self.input_TD).square().mean().backward()
        self.trained.pre_update_hooks.run()
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass(frozen=True)
class Taken:
    """Seconds of a save and the step after it."""

    all: float
    own: float
    """Without those in which training waits for a processor."""
    later: float
    """Of all steps after it until the checkpoint is there."""
    steps: int
    """How many those are."""


def taken(training: Training, checkpoints: CheckpointManager | None, number: int) -> Taken:
    """A save, if there is anything to save with, and steps until it is over."""
    os.sync()
    started, before = time.perf_counter(), queued()
    if checkpoints:
        checkpoints.save(number, {"step": number})
    training.step()
    whole, waited = time.perf_counter() - started, queued() - before
    started, steps = time.perf_counter(), 0
    while checkpoints and not (checkpoints.root / f"global_step_{number}").is_dir():
        training.step()
        steps += 1
    later = time.perf_counter() - started
    if checkpoints:
        checkpoints.finish()
    return Taken(whole, whole - waited, later, steps)


def queued() -> float:
    """Seconds that this thread has waited for a processor since it began."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def main() -> None:
    torch.set_num_threads(1)
    training, ranks = (
        Training(int(sys.argv[1]) if len(sys.argv) > 1 else 100),
        init_process_group(600),
    )
    training.step()
    size = sum(3 * matrix.nbytes for matrix in training.matrices)
    with tempfile.TemporaryDirectory() as folder:
        a, b = Path(folder) / "a", Path(folder) / "b"
        saves = {
            "none": None,
            "false": CheckpointManager(a, training.trained, ranks, writes="at_once", limit=1),
            "true": CheckpointManager(b, training.trained, ranks, writes="behind", limit=1),
        }
        rounds = [
            {name: taken(training, checkpoints, number) for name, checkpoints in saves.items()}
            for number in range(1, REPEATS + 2)
        ][1:]
    step = statistics.median(each["none"].all for each in rounds)
    own = statistics.median(each["none"].own for each in rounds)
    print(f"{size / 1e9:.2f} GB of tensors; a step takes {step:.3f} s, {own:.3f} s of them its own")
    stalls: dict[str, tuple[float, float]] = {}
    for name in ("false", "true"):
        more = statistics.median(each[name].all - each["none"].all for each in rounds)
        mine = statistics.median(each[name].own - each["none"].own for each in rounds)
        stalls[name] = more, mine
        print(f"save_async {name:5}: {more:7.3f} s more, {mine:7.3f} s of them its own")
    ratios = [mine / other for mine, other in zip(stalls["true"], stalls["false"], strict=True)]
    print(f"ratio {ratios[0]:.3f}, of its own {ratios[1]:.3f}; goal {GOAL:.3f}")
    later = [each["true"].later - each["true"].steps * step for each in rounds]
    print(f"steps after that, until it is over: {statistics.median(later):.3f} s more")
    destroy_process_group()


if __name__ == "__main__":
    main()
