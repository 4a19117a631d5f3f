"""How long training stands still for a checkpoint: `python tests/bench/bench_save.py [MILLIONS]`.

A model of so many million parameters (100) in fp32 with AdamW's two states, on one process. Saves
that wait for the disk and saves that are written behind training take turns, each with the one
before it over; the first of each, which makes memory for copies, is not counted. Medians of five.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from penstock.engine.checkpoint import Checkpoints
from penstock.engine.checkpoint_state import Trained
from penstock.engine.parallel.pieces import hold, whole_piece
from penstock.engine.ranks import join, leave

REPEATS = 5
WIDTH = 2048


def made(millions: int) -> Trained:
    """Square matrices, and an optimizer that has taken a step."""
    count = max(1, round(millions * 1e6 / WIDTH**2))
    parameters = [torch.nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(count)]
    held = [
        hold(f"{number}.weight", parameter, (whole_piece(f"{number}.weight", (WIDTH, WIDTH)),))
        for number, parameter in enumerate(parameters)
    ]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return Trained(held, optimizer, only_trained=False)


def main() -> None:
    millions = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    trained, ranks = made(millions), join(600)
    size = sum(3 * held.parameter.nbytes for held in trained.held)
    stalls: dict[str, list[float]] = {"at_once": [], "behind": []}
    with tempfile.TemporaryDirectory() as folder:
        saves = {
            "at_once": Checkpoints(Path(folder) / "a", trained, ranks, writes="at_once", limit=1),
            "behind": Checkpoints(Path(folder) / "b", trained, ranks, writes="behind", limit=1),
        }
        for step in range(1, REPEATS + 2):
            for name, checkpoints in saves.items():
                started = time.perf_counter()
                checkpoints.save(step, {"step": step})
                stalls[name].append(time.perf_counter() - started)
                checkpoints.finish()
    medians = {name: statistics.median(seconds[1:]) for name, seconds in stalls.items()}
    print(f"{size / 1e9:.2f} GB of tensors")
    for name, seconds in medians.items():
        print(f"save_async {str(name == 'behind').lower():5}: {seconds:7.3f} s still")
    print(f"ratio {medians['behind'] / medians['at_once']:.3f}; goal 0.100")
    leave()


if __name__ == "__main__":
    main()
