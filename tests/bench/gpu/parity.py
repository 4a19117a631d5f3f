"""Two training steps of every model family through the engine, on the GPU and on a CPU.

The same weights and rows, in full precision and under bf16 mixed precision, and on
a GPU with experts on Triton. Compared are the loss and the gradient norm of both steps: in full
precision with the CPU's, under mixed precision with those of full precision. Then the host syncs
of a step are counted, by PyTorch's own debug mode.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from penstock.engine.distributed.ranks import destroy_process_group, init_process_group
from tests.bench.gpu.profile import SYNCS, count_syncs
from tests.bench.timing import CUDA, machine, verdict
from tests.engine import loops, runs
from tests.models.twins import FAMILIES, SPARSE, hf_model

DRY = ("qwen3", "qwen3_moe")
STEPS = 2
OFF_FP32, OFF_BF16 = 1e-4, 3e-2
"""The most that a number may be off, relative to it."""

Numbers = dict[str, list[list[float]]]
"""By name of a run: loss and gradient norm of each step."""


def write(folder: Path, families: list[str]) -> None:
    """Weights of each family, and rows."""
    for family in families:
        model = hf_model(family, tied=False, vocab_size=runs.VOCAB, max_position_embeddings=512)
        model.save_pretrained(folder / family)
    runs.write_rows(folder / "packed", 16)


def job_of(folder: Path, out: Path, family: str, **settings: Any) -> Any:
    run = runs.run_config(
        out,
        folder / family,
        model={"model_path": str(folder / family), **settings.pop("model", {})},
        data_parallel_mode="none",
        optimizer="adamw",
        lr=1e-3,
        max_steps=1000,
        num_train_epochs=1000,
        **settings,
    )
    return runs.job_of(run, folder / "packed")


def variants(family: str, *, full: bool) -> dict[str, dict[str, Any]]:
    """Settings of each run of a family."""
    found: dict[str, dict[str, Any]] = {family: {}}
    if full:
        found[f"{family}, bf16"] = {"enable_mixed_precision": True}
        if family in SPARSE and CUDA:
            triton = {"moe_implementation": "triton"}
            found[f"{family}, triton experts, bf16"] = {
                "enable_mixed_precision": True,
                "model": triton,
            }
    return found


def steps(folder: Path, families: list[str], *, full: bool) -> Numbers:
    """Each run's numbers on the device there is; a run that fails is told and has none."""
    ranks = init_process_group(600)
    found: Numbers = {}
    for family in families:
        for name, settings in variants(family, full=full).items():
            with tempfile.TemporaryDirectory() as out:
                try:
                    loop = loops.loop_of(job_of(folder, Path(out), family, **settings), ranks)
                    records = [loops.step(loop) for _ in range(STEPS)]
                    found[name] = [[one["loss"], one["grad_norm"]] for one in records]
                except Exception as error:  # noqa: BLE001 - the others are still to be seen
                    print(f"{name}: FAILED: {type(error).__name__}: {str(error)[:400]}", flush=True)
    destroy_process_group()
    return found


def on_cpu(folder: Path, families: list[str]) -> Numbers:
    """The same by a process that sees no GPU."""
    command = [sys.executable, "-m", "tests.bench.gpu.parity", "--reference", str(folder)]
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    made = subprocess.run(
        [*command, *families], env=variables, check=True, capture_output=True, text=True
    )
    return json.loads(made.stdout.splitlines()[-1])


def compare(mine: Numbers, reference: Numbers, families: list[str], *, full: bool) -> int:
    """Print each run; returns how many are off or missing."""
    bad = 0
    for family in families:
        for name in variants(family, full=full):
            limit = OFF_FP32 if name == family else OFF_BF16
            if name not in mine:
                bad += 1
                continue
            off = max(
                abs(one - other) / abs(other)
                for ours, theirs in zip(mine[name], reference[family], strict=True)
                for one, other in zip(ours, theirs, strict=True)
            )
            bad += off > limit
            shown = "ok" if off <= limit else "OFF"
            print(f"{name:36} loss {mine[name][0][0]:.6f}  off by {off:.1e}  {shown}", flush=True)
    return bad


def syncs(folder: Path) -> int:
    """Host syncs of a step, once warm, as PyTorch's debug mode counts them."""
    ranks = init_process_group(600)
    with tempfile.TemporaryDirectory() as out:
        settings = {"enable_mixed_precision": True, "gradient_accumulation_steps": 2}
        settings |= {"global_batch_size": None, "micro_batch_size": 1}
        loop = loops.loop_of(job_of(folder, Path(out), "qwen3", **settings), ranks)
        for _ in range(3):
            loops.step(loop)
        found = count_syncs(loop)
    destroy_process_group()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--reference", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.reference:
        folder, *families = asked.reference
        print(json.dumps(steps(Path(folder), families, full=False)))
        return
    print(machine())
    families: list[str] = [*DRY] if asked.dry else [*FAMILIES, *SPARSE]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write(folder, families)
        reference = on_cpu(folder, families)
        bad = compare(
            steps(folder, families, full=not asked.dry), reference, families, full=not asked.dry
        )
        print(verdict("runs that fail or are off", bad, 0, at_most=True))
        print(verdict("host syncs of a step", syncs(folder), SYNCS, at_most=True))
    if bad:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
