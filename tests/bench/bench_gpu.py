"""A whole training step of a model of 8 billion parameters on one GPU, beside transformers' model
with Liger-Kernel: `python -m tests.bench.bench_gpu [--case adapters|weights]
[--document N] [--dry]`.

Random weights, bfloat16, rows of 8192 tokens: packed with documents of some 800, or with
`--document 8192` of one. Adapters of rank 16 on all linear layers, or all weights with weights,
gradients and AdamW's states in bfloat16 (8 bytes a parameter; ours rounds at random). Each is tried
with nothing recomputed, and where that does not fit with more, until it does. The two take turns
as wholes: a GPU does not hold both.

Told are tokens a second, the model's operations a second as a share of the data sheet's (MFU; what
counts is in `train_cuda.py`) and of a square product of 8192 measured here, and the peak of memory.
Goals: 1.1 times the peer's tokens a second; all weights at 0.48 of the data sheet; adapters at 0.65
of the measured product, which is their own limit. With `--dry` it is a tiny model on a CPU.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.engine.distributed.ranks import ProcessInfo, destroy_process_group, init_process_group
from penstock.rows.reader import PackedRows
from tests.bench import peer_liger, peers, train_cuda
from tests.bench.data.packed import write_rows
from tests.bench.timing import CUDA, machine, peak, verdict
from tests.bench.train_cuda import MEASURED, QWEN3_8B, WARMING, Case, Figures
from tests.engine import runs

OF_PEER, OF_SHEET, OF_PRODUCT = 1.1, 0.48, 0.65
RANK = 16
ON_ONE = {"data_parallel_mode": "none"}
IN_16_BITS = {
    "precision": "bf16",
    "enable_mixed_precision": False,
    "optimizer": "anyprecision_adamw",
    "optimizer_dtype": "bf16",
    "stochastic_rounding": True,
    "grad_accum_dtype": "bf16",
}
CASES = {
    "adapters": Case(
        "adapters", QWEN3_8B, train=ON_ONE, lora={"enable_lora": True, "lora_rank": RANK}
    ),
    "weights": Case("weights", QWEN3_8B, train={**ON_ONE, **IN_16_BITS}),
}
OURS: Mapping[str, dict[str, Any]] = {
    "nothing": {"enable_gradient_checkpointing": False},
    "mlp": {"recompute_modules": ["mlp"]},
    "layers": {},
}
"""What is recomputed, the least first, and how that is asked for."""


def measure_peer(case: Case, folder: Path, recomputed: Any) -> Figures:
    """As `train_cuda.measure` does, of transformers' model on the same rows."""
    write(case, folder)
    packed = PackedRows(folder / "packed" / "data" / "train")
    step = peer_liger.liger_step(case.hf_config, RANK if case.lora else None, recomputed)
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    rates, loss = [], 0.0
    for number in range(WARMING + MEASURED):
        row = number % len(packed)
        started = time.perf_counter()
        loss = step(packed.row(row))
        spent = time.perf_counter() - started
        if number >= WARMING:
            flop = train_cuda.model_flop(case, packed, [row])
            rates.append((case.row / spent, flop / spent))
    of_tokens, of_flop = (statistics.median(each) for each in zip(*rates, strict=True))
    return Figures(of_tokens, of_flop, torch.cuda.max_memory_allocated() if CUDA else 0, loss)


def write(case: Case, folder: Path) -> None:
    """The rows that ours is given."""
    sizes = {"row": case.row, "document": case.document, "vocabulary": runs.VOCAB}
    write_rows(folder / "packed", num_rows=4, **sizes)


def first_that_fits(
    name: str, ways: Mapping[str, Callable[[Path], Figures]], sheet: float | None, product: float
) -> Figures | None:
    """Its figures, which are printed; None where nothing fits."""
    for recomputed, measure in ways.items():
        found = train_cuda.measure_if_it_fits(f"{name}, {recomputed} recomputed", measure)
        if found is None:
            continue
        share = f"{found.flop_per_second / sheet:.1%} MFU" if sheet else "MFU of an unknown GPU"
        print(
            f"{name:28} {recomputed} recomputed: {found.tokens_per_second:9,.0f} tokens/s, "
            f"{found.flop_per_second / 1e12:5.0f} TFLOP/s, {share}, "
            f"{found.flop_per_second / product:.1%} of the product, "
            f"{found.peak_bytes / 2**30:.1f} GiB",
            flush=True,
        )
        return found
    return None


def compare(case: Case, ranks: ProcessInfo, product: float) -> None:
    """Print ours, the peer's and how they compare."""
    device = torch.cuda.get_device_name() if CUDA else "CPU"
    sheet = next((flop for name, flop in train_cuda.PEAKS.items() if name in device), None)

    def ours(train: dict[str, Any]) -> Callable[[Path], Figures]:
        asked = replace(case, train={**case.train, **train})
        return lambda folder: train_cuda.measure(asked, folder, ranks)

    ways = {recomputed: ours(train) for recomputed, train in OURS.items()}
    mine = first_that_fits(f"{case.name}, ours", ways, sheet, product)
    theirs = first_that_fits(
        f"{case.name}, transformers",
        {
            recomputed: lambda folder, recomputed=recomputed: measure_peer(case, folder, recomputed)
            for recomputed in ("nothing", "layers")
        },
        sheet,
        product,
    )
    if mine and theirs:
        ratio = mine.tokens_per_second / theirs.tokens_per_second
        print(verdict(f"{case.name}: tokens a second, ours / the peer's", ratio, OF_PEER))
    if mine and case.lora:
        print(
            verdict(
                f"{case.name}: share of the product", mine.flop_per_second / product, OF_PRODUCT
            )
        )
    elif mine and sheet:
        print(
            verdict(f"{case.name}: share of the data sheet", mine.flop_per_second / sheet, OF_SHEET)
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=[*CASES])
    parser.add_argument("--document", type=int, help="tokens of a middling document")
    parser.add_argument("--dry", action="store_true")
    asked = parser.parse_args()
    if not (CUDA or asked.dry):
        raise SystemExit("a model of 8 billion parameters is measured on a GPU; there is none here")
    ranks = init_process_group(600)
    print(f"{machine()}; the peer's attention is {peer_liger.attention()}")
    peers.say_missing("liger")
    product = peak(64 if asked.dry else 8192)
    for name, case in CASES.items():
        if asked.case in (None, name):
            document = None if asked.document == case.row else asked.document or case.document
            small = {"shape": runs.TINY, "row": 64, "document": 20} if asked.dry else {}
            compare(replace(case, **{"document": document, **small}), ranks, product)
    destroy_process_group()


if __name__ == "__main__":
    main()
