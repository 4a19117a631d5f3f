"""Our training step on GPUs: models of billions of parameters, random weights, bf16, packed rows.

`bench_train.py --device cuda` runs it on as many GPUs as ranks, sharded over all of them. Tokens
per second are of the median step of five after two; memory is the most that PyTorch had allocated.

Model FLOP of a step are 6 per token and parameter of a matrix (4 where the matrix is frozen, whose
own gradient nobody computes) and 6 per layer, head feature and squared length of a document, which
is causal attention forward and backward. What is recomputed does not count. MFU is their rate as a
share of the GPU's bf16 peak without sparsity.
"""

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.quantization import quantized_reader
from penstock.models.decoder_config import DecoderConfig
from penstock.models.flops import matrix_parameters
from penstock.models.initialize import initialize
from penstock.models.registry import get_family
from penstock.rows.reader import PackedRows
from penstock.train.trainer import Trainer
from tests.bench.data.packed import write_rows
from tests.bench.figures import record
from tests.bench.pages import write_section
from tests.bench.timing import CUDA
from tests.engine import loops, runs

WARMING, MEASURED = 2, 5

PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}
"""Data sheets' dense bf16 FLOP/s, by a part of the device's name; those of SXM modules."""

QWEN3_8B = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
QWEN3_1_7B = {
    **QWEN3_8B,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
QWEN3_0_6B = {**QWEN3_1_7B, "hidden_size": 1024, "intermediate_size": 3072}


@dataclass(frozen=True)
class Case:
    """A model, and how it is trained."""

    name: str
    shape: dict[str, Any]
    row: int = 8192
    document: int | None = 800
    """Tokens of a middling document; None: a document fills its row."""
    train: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    """Settings of the section `model`."""

    @property
    def hf_config(self) -> dict[str, Any]:
        """The model."""
        longest = {"max_position_embeddings": 32_768, "initializer_range": 0.02}
        return {**runs.TINY, **longest, **self.shape}


ADAPTERS = {"enable_lora": True, "lora_rank": 16}
KEPT = {"enable_gradient_checkpointing": False}
CASES = (
    Case("Qwen3-8B, adapters", QWEN3_8B, lora=ADAPTERS),
    Case("Qwen3-8B, all weights", QWEN3_8B),
    Case("Qwen3-1.7B, all weights", QWEN3_1_7B),
    Case("Qwen3-1.7B, all weights, nothing recomputed", QWEN3_1_7B, train=KEPT),
)


@dataclass(frozen=True)
class Figures:
    """What was measured of a case."""

    tokens_per_second: float
    """Of each rank."""
    flop_per_second: float
    """Of each rank: model FLOP."""
    peak_bytes: int
    """The most of any rank."""
    loss: float


def measure_all(ranks: ProcessInfo, folder: Path, cases: Sequence[Case] = CASES) -> None:
    """Measure every case in `folder` and write the device's page."""
    device = torch.cuda.get_device_name(ranks.device)
    peak = next((flop for name, flop in PEAKS.items() if name in device), None)
    lines = [
        f"{ranks.world_size} x {device}, PyTorch {torch.__version__}, sharded over all of them.",
        "",
        "| case | row | tokens/s per GPU | model TFLOP/s | MFU | peak memory |",
        "|---|---|---|---|---|---|",
    ]
    for number, case in enumerate(cases):
        try:
            found = measure(case, folder / str(number), ranks)
        except torch.OutOfMemoryError:
            figures = "does not fit | | |"
        else:
            share = f"{found.flop_per_second / peak:.1%}" if peak else "unknown peak"
            figures = (
                f"{found.tokens_per_second:,.0f} | {found.flop_per_second / 1e12:.0f} | {share} | "
                f"{found.peak_bytes / 2**30:.1f} GiB |"
            )
        torch.cuda.empty_cache()
        lines.append(f"| {case.name} | {case.row} | {figures}")
        if ranks.is_main_process:
            print(lines[-1], flush=True)
    if ranks.is_main_process:
        name = "-".join(device.lower().split())
        write_page(name, "tests/bench/bench_train.py --device cuda", lines)


def settings_of(case: Case) -> dict[str, Any]:
    """Its settings of training."""
    return {
        "enable_mixed_precision": True,
        "global_batch_size": None,
        "max_steps": 1000,
        "num_train_epochs": 1000,
        "optimizer": "adamw",
        "lr": 1e-5,
        **case.train,
    }


def build_trainer(case: Case, folder: Path, ranks: ProcessInfo) -> Trainer:
    """The case's training loop before its first step; rows and config are written to `folder`."""
    if ranks.is_main_process:
        write_rows(
            folder / "packed",
            num_rows=max(4, case.train.get("gradient_accumulation_steps", 1)) * ranks.world_size,
            row=case.row,
            document=case.document,
            vocabulary=runs.VOCAB,
        )
        runs.write_config(folder / "model", **case.hf_config)
    ranks.barrier()
    settings = settings_of(case)
    run = runs.run_config(
        folder / "out", folder / "model", lora=case.lora, model=case.model, **settings
    )
    # Weights of every model without files are drawn there (`RandomInitTensors`), quantized or not.
    with patch.object(quantized_reader, "initialize", _draw_on_gpu if CUDA else initialize):
        return loops.loop_of(runs.job_of(run, folder / "packed"), ranks)


def _draw_on_gpu(name: str, shape: Sequence[int], seed: int, config: DecoderConfig) -> torch.Tensor:
    """In place of `initialize`, which draws 8 billion numbers on a CPU in a minute."""
    if len(shape) < 2 or name.endswith("bias"):
        return initialize(name, shape, seed, config)
    return torch.randn(*shape, device="cuda") * config.initializer_range


def measure(
    case: Case,
    folder: Path,
    ranks: ProcessInfo,
    prepare: Callable[[Trainer], None] = lambda _: None,
) -> Figures:
    """Figures of one case; `prepare` may change its model before the first step."""
    loop = build_trainer(case, folder, ranks)
    prepare(loop)
    seconds, flop, tokens, loss, peak = [], [], [], 0.0, 0
    for number in range(WARMING + MEASURED):
        rows = loop.batches.rows(loop.at.cursor).tolist()
        ranks.barrier()
        started = time.perf_counter()
        record = loops.step(loop)  # ends with the loss on the host, so nothing is still under way
        if number >= WARMING:
            seconds.append(time.perf_counter() - started)
            flop.append(model_flop(case, loop.rows, rows))
            tokens.append(record["tokens"])
        # A step reads the peak, and lets PyTorch begin anew.
        peak = max(peak, loops.peak_memory(loop))
        loss = record["loss"]
    rates = [(t / s, f / s) for t, f, s in zip(tokens, flop, seconds, strict=True)]
    of_tokens, of_flop = (
        statistics.median(each) / ranks.world_size for each in zip(*rates, strict=True)
    )
    return Figures(of_tokens, of_flop, peak if ranks.device.type == "cuda" else 0, loss)


def measure_if_it_fits(name: str, measuring: Callable[[Path], Figures]) -> Figures | None:
    """What `measuring` finds in a folder of its own, recorded; None if memory does not suffice."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = measuring(Path(folder))
    except torch.OutOfMemoryError:
        print(f"{name}: does not fit", flush=True)
        return None
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    record(name, found.tokens_per_second, "tokens/s")
    record(name, found.flop_per_second / 1e12, "TFLOP/s")
    record(name, found.peak_bytes / 2**30, "GiB")
    return found


def model_flop(case: Case, packed: PackedRows, rows: Iterable[int]) -> float:
    """Of the training step over these rows."""
    config = get_family(case.hf_config).read(case.hf_config)
    each = 4 if case.lora else 6
    features = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    total = 0.0
    for number in rows:
        lengths = packed.row(number).lengths.astype(float)
        total += each * matrix_parameters(config) * lengths.sum()
        total += 6 * features * (lengths**2).sum()
    return total


def write_page(name: str, command: str, lines: Sequence[str]) -> None:
    """A section of figures in docs/benchmarks."""
    write_section(name, f"Training steps: {name}", [f"Written by `{command}`.", "", *lines])
