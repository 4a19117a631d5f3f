"""Adapters over quantized weights: `python -m tests.bench.bench_qlora --memory | --learning BASE`.

`--memory`: the base weights of a random Llama in bf16 (default 1.0e9 parameters, next to all of
them in linear layers) are loaded in every format, each in a process of its own. Printed are the
peak of memory while loading over what the process had after importing, and what is held in the end,
both divided by the bytes of the weights in bf16 (goal of formats of 4 bits: at most 0.30). Peers,
if they are installed: transformers with bitsandbytes' NF4.

`--learning BASE --data FILE`: adapters are trained on questions and answers (columns `question` and
`answer`, such as GSM8K's) over the weights in the folder BASE as they are and in every format, the
same rows in the same order, and the loss of the last steps and of rows that were held out is
printed with its ratio to that over unquantized weights (goal: at most 1.02).
"""

import argparse
import ctypes
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.bench.artifacts.bench_merge import write_base

FORMATS = ("bf16", "nf4", "nvfp4", "block_fp8", "int8")
FOUR_BITS = ("nf4", "nvfp4")
VOCABULARY = 512
"""Next to nothing of the model is not in linear layers."""


def load_ours(folder: Path, kept: str) -> Any:
    """What a run of one process holds before its first step."""
    from penstock.config.loading.load import loads
    from penstock.engine.build import assemble
    from penstock.engine.distributed.ranks import init_process_group

    quantized = {"enable_qlora": True, "quant_format": kept} if kept != "bf16" else {}
    run = loads(
        {
            "model": {"model_path": str(folder), "tokenizer_path": "builtin:bytes"},
            "data": {"datasets": [{"path": "builtin:arithmetic", "type": "chat"}]},
            "train": {"data_parallel_mode": "none", "output_dir": "unused"},
            "lora": {"enable_lora": True, "lora_rank": 1, **quantized},
        }
    )
    hf_config = json.loads((folder / "config.json").read_text())
    return assemble(run, hf_config, folder, init_process_group(60), lambda _: None)


def load_peer(folder: Path, kept: str) -> Any:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    assert kept == "nf4"
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype="auto")


WAYS = {"ours": load_ours, "transformers": load_peer}


def measure(way: str, kept: str, folder: Path) -> None:
    """In a process of its own: seconds, and bytes at the peak and in the end over those before."""
    torch.manual_seed(0)
    # What is imported on the way is not the weights'.
    with tempfile.TemporaryDirectory() as small:
        write_base(Path(small) / "base", 1, VOCABULARY)
        WAYS[way](Path(small) / "base", kept)
    gc.collect()
    trim = ctypes.CDLL(None).malloc_trim
    # What is freed must not be used again unseen.
    trim(0)
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    started = time.perf_counter()
    held = WAYS[way](folder, kept)
    seconds = time.perf_counter() - started
    peak = _memory("VmHWM") - before
    trim(0)
    found = {"peak": peak, "end": _memory("VmRSS") - before}
    del held
    print(json.dumps({"seconds": seconds, **found}))


def _memory(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) * 1024


def memory(layers: int) -> None:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        base = Path(name) / "base"
        parameters = write_base(base, layers, VOCABULARY)
        print(f"{parameters:,} parameters, {2 * parameters / 1e9:.2f} GB in bf16, one process")
        for way, kept in [*(("ours", kept) for kept in FORMATS), ("transformers", "nf4")]:
            command = [
                sys.executable,
                "-m",
                "tests.bench.bench_qlora",
                "--measure",
                way,
                kept,
                str(base),
            ]
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode:
                print(f"{way:12} {kept:10} not measured: {run.stderr.splitlines()[-1]}")
                continue
            seen = json.loads(run.stdout.splitlines()[-1])
            peak, end = (seen[key] / (2 * parameters) for key in ("peak", "end"))
            goal = " (goal 0.30)" if kept in FOUR_BITS else ""
            print(
                f"{way:12} {kept:10} peak {peak:.3f} x bf16{goal}   held {end:.3f}"
                f"   {seen['seconds']:6.1f} s"
            )


def learning(base: Path, data: Path, steps: int) -> None:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        plain = None
        for kept in FORMATS:
            losses, evaluated = _train(folder, base, data, kept, steps)
            last = statistics.mean(losses[-10:])
            plain = plain or (last, evaluated)
            print(
                f"{kept:10} loss {losses[0]:.4f} -> {last:.4f} ({last / plain[0]:.4f})"
                f"   held out {evaluated:.4f} ({evaluated / plain[1]:.4f}, goal 1.02)"
            )


def _train(
    folder: Path, base: Path, data: Path, kept: str, steps: int
) -> tuple[list[float], float]:
    """The losses of all steps, and that of held out rows after them."""
    quantized = {"enable_qlora": True, "quant_format": kept} if kept != "bf16" else {}
    config = {
        "model": {"model_path": str(base.resolve())},
        "data": {
            "datasets": [
                {
                    "path": str(data.resolve()),
                    "type": "instruction",
                    "field_instruction": "question",
                    "field_output": "answer",
                }
            ],
            "val_set_size": 200,
            "dataset_prepared_path": str(folder / "data"),
            "sample_packing_sequence_len": 2048,
        },
        "train": {
            "output_dir": str(folder / kept),
            "data_parallel_mode": "none",
            "micro_batch_size": 1,
            "gradient_accumulation_steps": 2,
            "max_steps": steps,
            "lr": 2e-3,
            "lr_warmup_ratio": 0.05,
            "lr_decay_style": "cosine",
            "save_epochs": 0,
        },
        "lora": {"enable_lora": True, "lora_rank": 16, **quantized},
        "launch": {"nproc_per_node": 1},
        "pipeline": {"stages": ["prepare", "pack", "train"]},
    }
    file = folder / f"{kept}.yaml"
    file.write_text(json.dumps(config))
    command = ["penstock", "train", str(file)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = (folder / kept / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    losses = [record["loss"] for record in records if "loss" in record]
    [evaluated] = [record["eval_loss"] for record in records if "eval_loss" in record]
    return losses, evaluated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--learning", type=Path, metavar="BASE")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        way, kept, folder = given.measure
        measure(way, kept, Path(folder))
        return
    if given.memory:
        memory(given.layers)
    if given.learning:
        learning(given.learning, given.data, given.steps)


if __name__ == "__main__":
    main()
