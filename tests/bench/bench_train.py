"""A training step beside those of others, on the same rows with the same layout:
`python -m torch.distributed.run --nproc-per-node 2 -m tests.bench.bench_train`.

A small Qwen3 under FSDP2, in bf16 and in fp32, on rows of packed documents and on rows of one
document each. Nothing is recomputed, on either side. Every step ends with its update and its loss
on all ranks; ours also reads its rows. Steps of all take turns, and figures are of the median of
five rounds: tokens per second, and per CPU second of all ranks, which other work on the machine
disturbs less. Losses are compared first: they must be the same work. Peers that are not installed
are named as missing. Figures go to docs/benchmarks/cpu.md.

With `--model FOLDER` there are steps of a model of that folder's size too, of one chat of 72 tokens
and of 2,000 tokens.

On a machine with GPUs, `--device cuda` measures our step alone on models of billions of parameters
(`train_cuda.py`).
"""

import argparse
import importlib
import importlib.util
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.engine.distributed.ranks import ProcessInfo, destroy_process_group, init_process_group
from penstock.models.initialize import initialize
from penstock.models.registry import get_family
from penstock.rows.collate import MicroBatch
from penstock.train.dataloader import read
from tests.bench import train_cuda
from tests.bench.data.packed import write_rows
from tests.engine import loops, runs

GOAL, ROUNDS, SEED = 1.15, 5, 7
PEERS = {
    "transformers": ("transformers", "peer_hf", "transformers_step"),
    "torchtitan": ("torchtitan", "peer_torchtitan", "torchtitan_step"),
}
"""Name to the package it needs, the module beside this one and the function in it."""


def small_qwen3(vocabulary: int) -> dict[str, Any]:
    """A config.json of four layers."""
    return {
        **runs.TINY,
        "vocab_size": vocabulary,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "initializer_range": 0.02,
    }


@dataclass(frozen=True)
class Case:
    """What is measured: a model and rows."""

    name: str
    vocabulary: int
    row: int
    """Tokens in a row."""
    document: int | None
    """Tokens of a middling document; None: a document fills its row."""
    rows_per_step: int
    sizes: Path | None = None
    """A folder with the config.json of a model; None: a small one."""

    @property
    def hf_config(self) -> dict[str, Any]:
        """The model."""
        if self.sizes is None:
            return small_qwen3(self.vocabulary)
        return json.loads((self.sizes / "config.json").read_text())


CASES = (
    Case("packed", vocabulary=4096, row=4096, document=400, rows_per_step=2),
    Case("one document", vocabulary=32768, row=1024, document=None, rows_per_step=2),
)


def cases_of(sizes: Path) -> tuple[Case, ...]:
    """Steps of a model of this size."""
    vocabulary = json.loads((sizes / "config.json").read_text())["vocab_size"]
    return (
        Case("real size, chat", vocabulary, 72, None, rows_per_step=2, sizes=sizes),
        Case("real size, 2,000 tokens", vocabulary, 2000, 400, rows_per_step=2, sizes=sizes),
    )


def ours(folder: Path, ranks: ProcessInfo, *, mixed: bool) -> Any:
    """Our loop over the rows in `folder`, ready for its first step."""
    run = runs.run_config(
        folder / "out",
        folder / "model",
        enable_mixed_precision=mixed,
        enable_gradient_checkpointing=False,
        global_batch_size=None,
        max_steps=1000,
        num_train_epochs=1000,
        optimizer="adamw",
        lr=1e-4,
        max_grad_norm=1.0,
        seed=SEED,
    )
    return loops.loop_of(runs.job_of(run, folder / "packed"), ranks)


def weights(hf_config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The weights that ours starts from, by Hugging Face's names."""
    family = get_family(hf_config)
    config = family.read(hf_config)
    shapes = family.weight_map(config, merge_qkv=True).hf_shapes()
    return {name: initialize(name, shape, SEED, config) for name, shape in shapes.items()}


@dataclass(frozen=True)
class Speed:
    """Tokens of all ranks."""

    per_second: float
    per_cpu_second: float


def measure(case: Case, folder: Path, ranks: ProcessInfo, *, mixed: bool) -> dict[str, Speed]:
    """How fast each is."""
    loop = ours(folder, ranks, mixed=mixed)
    steps: list[list[MicroBatch]] = [
        list(read(loop.rows, groups, loop.reading))
        for groups, _ in zip(loop._steps(), range(ROUNDS + 1), strict=False)
    ]
    ways: dict[str, Callable[[int], float]] = {"ours": lambda _: loops.step(loop)["loss"]}
    for name, (package, module, function) in PEERS.items():
        if importlib.util.find_spec(package) is None:
            say(ranks, f"  {name} is not installed, and is missing here")
            continue
        make = getattr(importlib.import_module(f"tests.bench.{module}"), function)
        step = make(case.hf_config, weights(case.hf_config), ranks, mixed=mixed)
        ways[name] = lambda number, step=step: step(steps[number])
    first = {name: way(0) for name, way in ways.items()}
    say(ranks, "  first loss " + ", ".join(f"{n} {loss:.5f}" for n, loss in first.items()))
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(1, ROUNDS + 1):
        for name, way in ways.items():
            ranks.barrier()
            started, used = time.perf_counter(), time.process_time()
            way(number)
            elapsed, used = time.perf_counter() - started, time.process_time() - used
            of_all = ranks.all_reduce_sum(torch.tensor(used, device=ranks.device)).item()
            seconds[name].append((elapsed, of_all))
    tokens = case.row * case.rows_per_step
    medians = {
        name: [statistics.median(each) for each in zip(*found, strict=True)]
        for name, found in seconds.items()
    }
    return {name: Speed(tokens / wall, tokens / cpu) for name, (wall, cpu) in medians.items()}


def report(speeds: dict[str, Speed]) -> list[str]:
    """A line for each, and our ratio to the fastest peer."""
    lines = [
        f"  {name:14} {speed.per_second:8.0f} tokens/s {speed.per_cpu_second:8.0f} per CPU second"
        for name, speed in speeds.items()
    ]
    peers = [speed for name, speed in speeds.items() if name != "ours"]
    if peers:
        wall = speeds["ours"].per_second / max(peer.per_second for peer in peers)
        cpu = speeds["ours"].per_cpu_second / max(peer.per_cpu_second for peer in peers)
        lines.append(f"  ours / best peer {wall:.2f}, per CPU second {cpu:.2f} (goal {GOAL})")
    return lines


def say(ranks: ProcessInfo, line: str) -> None:
    """Print it once."""
    if ranks.is_main_process:
        print(line, flush=True)


def beside_peers(ranks: ProcessInfo, asked: argparse.Namespace) -> None:
    """All cases that are asked for; their figures are written down if that is all of them."""
    lines: list[str] = []
    for case in (*CASES, *(cases_of(asked.model) if asked.model else ())):
        if asked.case not in (None, case.name):
            continue
        with shared_folder(ranks) as folder:
            if ranks.is_main_process:
                write_rows(
                    folder / "packed",
                    num_rows=16,
                    row=case.row,
                    document=case.document,
                    vocabulary=case.vocabulary,
                )
                (folder / "model").mkdir()
                (folder / "model" / "config.json").write_text(json.dumps(case.hf_config))
            ranks.barrier()
            for dtype in ("bf16", "fp32"):
                if asked.dtype not in (None, dtype):
                    continue
                lines.append(
                    f"{case.name}, rows of {case.row}, {dtype}, {ranks.world_size} processes"
                )
                say(ranks, lines[-1])
                found = report(measure(case, folder, ranks, mixed=dtype == "bf16"))
                for line in found:
                    say(ranks, line)
                lines += found
            ranks.barrier()
    if ranks.is_main_process and not (asked.case or asked.dtype or asked.model):
        machine = f"{platform.machine()}, {os.cpu_count()} CPUs, PyTorch {torch.__version__}."
        page = [machine, "", "```", *lines, "```"]
        train_cuda.write_page("cpu", "tests/bench/bench_train.py", page)


@contextmanager
def shared_folder(ranks: ProcessInfo) -> Generator[Path]:
    """A folder that all ranks know, and that is gone at the end."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(str(ranks.all_gather(name)[0]))
        ranks.barrier()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--case", help="Only the case of this name.")
    parser.add_argument("--dtype", choices=["bf16", "fp32"])
    parser.add_argument("--model", type=Path, help="A folder with a model's config.json.")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    ranks = init_process_group(600)
    if asked.device != ranks.device.type:
        raise SystemExit(f"this machine's ranks run on {ranks.device.type}, not {asked.device}")
    if asked.device == "cpu":
        beside_peers(ranks, asked)
    else:
        with shared_folder(ranks) as folder:
            train_cuda.measure_all(ranks, folder)
    destroy_process_group()


if __name__ == "__main__":
    main()
