"""Merging an adapter: `python -m tests.bench.artifacts.bench_merge [--layers N] [--rounds N]
[--peer]`.

A random base model in bf16 (default 1.0e9 parameters) and an adapter of rank 16 on all its linear
layers. Printed are the median seconds against copying the model's files (goal: at most 1.3), the
peak of memory over what the process had after importing (goal: at most 1.5 GB), and with `--peer`
the same of peft's own way: load, merge_and_unload, save. Every measure has a process of its own,
and ways take turns; all of them end with what they wrote on the disk.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

GB = 1e9
SHARD = 1_000_000_000
WIDTH, INNER, VOCABULARY = 2048, 6144, 32_000
LINEAR = {
    "self_attn.q_proj": (WIDTH, WIDTH),
    "self_attn.k_proj": (WIDTH // 2, WIDTH),
    "self_attn.v_proj": (WIDTH // 2, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH),
    "mlp.gate_proj": (INNER, WIDTH),
    "mlp.up_proj": (INNER, WIDTH),
    "mlp.down_proj": (WIDTH, INNER),
}


def write_base(folder: Path, layers: int, vocabulary: int = VOCABULARY) -> int:
    """A Llama's files, a few layers to each; returns the parameters."""
    from transformers import LlamaConfig

    folder.mkdir()
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    shapes = {
        "model.embed_tokens.weight": (vocabulary, WIDTH),
        "lm_head.weight": (vocabulary, WIDTH),
        "model.norm.weight": (WIDTH,),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{name}.weight": shape for name, shape in LINEAR.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}.{norm}.weight"] = (WIDTH,)
    files: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        bytes_of = 2 * torch.Size(shape).numel()
        if size + bytes_of > SHARD:
            files.append([])
            size = 0
        files[-1].append(name)
        size += bytes_of
    weight_map = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = {name: torch.randn(shapes[name]).mul_(0.02).bfloat16() for name in names}
        save_file(tensors, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def write_adapter(folder: Path, layers: int) -> None:
    """Rank 16 on everything linear but the head."""
    folder.mkdir()
    tensors = {}
    for layer in range(layers):
        for name, (rows, columns) in LINEAR.items():
            at = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(16, columns).mul_(0.02)
            tensors[f"{at}.lora_B.weight"] = torch.randn(rows, 16).mul_(0.02)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted(name.rpartition(".")[2] for name in LINEAR)
    config = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def ours(base: Path, adapter: Path, out: Path):
    from penstock.export.merge import merge_folders

    return lambda: merge_folders(base, adapter, out)


def peer(base: Path, adapter: Path, out: Path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def merge() -> None:
        model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
        merged = PeftModel.from_pretrained(model, adapter).merge_and_unload()
        merged.save_pretrained(out)
        os.sync()

    return merge


def copying(base: Path, adapter: Path, out: Path):
    del adapter

    def copy() -> None:
        out.mkdir()
        for file in base.iterdir():
            shutil.copyfile(file, out / file.name)
            descriptor = os.open(out / file.name, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    return copy


WAYS = {"copying": copying, "ours": ours, "peft": peer}


def measure(way: str, folder: Path) -> None:
    """In a process of its own: seconds, and bytes at the peak over those before."""
    work = WAYS[way](folder / "base", folder / "adapter", folder / "out")
    before = _memory("VmRSS")
    # From here on the peak is the work's own, not that of importing.
    Path("/proc/self/clear_refs").write_text("5")
    started = time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    print(json.dumps({"seconds": seconds, "bytes": _memory("VmHWM") - before}))


def _memory(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=17)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        measure(given.measure[0], Path(given.measure[1]))
        return
    ways = [way for way in WAYS if way != "peft" or given.peer]
    seen: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        parameters = write_base(folder / "base", given.layers)
        write_adapter(folder / "adapter", given.layers)
        print(f"{parameters:,} parameters, {2 * parameters / GB:.2f} GB, rank 16")
        for _ in range(given.rounds):
            for way in ways:
                os.sync()
                command = [
                    sys.executable,
                    "-m",
                    "tests.bench.artifacts.bench_merge",
                    "--measure",
                    way,
                    name,
                ]
                run = subprocess.run(command, capture_output=True, text=True, check=True)
                seen[way].append(json.loads(run.stdout.splitlines()[-1]))
                shutil.rmtree(folder / "out")
    seconds = {way: statistics.median(one["seconds"] for one in seen[way]) for way in ways}
    for way in ways:
        peak = max(one["bytes"] for one in seen[way]) / GB
        print(
            f"{way:8} {seconds[way]:6.2f} s   {seconds[way] / seconds['copying']:5.2f} x copying"
            f"   peak + {peak:.2f} GB"
        )


if __name__ == "__main__":
    main()
