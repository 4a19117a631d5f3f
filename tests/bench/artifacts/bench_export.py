"""Exporting a checkpoint: `python -m tests.bench.artifacts.bench_export [--layers N] [--rounds N]`.

A random checkpoint in fp32 of a Llama of N layers (default 17: 1.0e9 parameters) becomes a folder
in bf16, loaded as transformers does before it counts. Beside it: torch reads the whole checkpoint,
casts and writes it, which loads nothing afterwards; and copying as many bytes as are written. Every
measure has a process of its own, and ways take turns. The peak is that of proportional sets, over
what the process has after importing; it does not grow with the layers if tensors are streamed
(goal: at most a file's bytes and 1 GB).
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from penstock.core.cache.stage import Artifact
from penstock.core.sources.pin import pin_model, pin_tokenizer
from penstock.engine.model_source import ModelSource
from penstock.export.stage import Export, ExportSettings
from tests.bench.artifacts.bench_merge import INNER, LINEAR, VOCABULARY, WIDTH
from tests.bench.child_processes import run_measured
from tests.bench.figures import record
from tests.stages.checkpoints import FOLDER, trained_artifact

GB = 1e9
SHARD = 500_000_000
PEAK = SHARD + GB


def write_checkpoint(folder: Path, layers: int) -> int:
    """The config and a train artifact with one checkpoint; returns the parameters."""
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    ).save_pretrained(folder / "config")
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, WIDTH),
        "lm_head.weight": (VOCABULARY, WIDTH),
        "model.norm.weight": (WIDTH,),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.{name}.weight": shape for name, shape in LINEAR.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{norm}.weight"] = (WIDTH,)
    tensors = {name: torch.randn(shape).mul_(0.02) for name, shape in shapes.items()}
    trained_artifact(folder / "train", tensors)
    return sum(tensor.numel() for tensor in tensors.values())


def ours(folder: Path) -> None:
    """The export stage."""
    config = str(folder / "config")
    Export(
        settings=ExportSettings(dtype="bfloat16", max_shard_bytes=SHARD, model_card=False),
        trained=Artifact("train", "0" * 64, folder / "train"),
        origin=ModelSource(
            config=pin_model(config),
            weights=None,
            tokenizer=pin_tokenizer("builtin:bytes"),
            config_path=config,
            model_path=None,
            tokenizer_path="builtin:bytes",
            seed=0,
            adapting=None,
        ),
    ).run(folder / "out")


def whole(folder: Path) -> None:
    """All of the checkpoint in memory."""
    from safetensors.torch import save_file

    state: dict[str, dict[str, torch.Tensor]] = {}
    _load_state_dict(
        state,
        storage_reader=FileSystemReader(folder / "train" / FOLDER),
        planner=_EmptyStateDictLoadPlanner(keys={"model"}),
        no_dist=True,
    )
    (folder / "out").mkdir()
    weights = {name: tensor.bfloat16() for name, tensor in state["model"].items()}
    save_file(weights, folder / "out" / "model.safetensors")


def copying(folder: Path) -> None:
    """As many bytes as an export has."""
    source = folder / "written"
    if source.is_dir():
        shutil.copytree(source, folder / "out")


WAYS = {"ours": ours, "torch, whole": whole, "copying": copying}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=17)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--way", choices=[*WAYS], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.folder:
        if asked.way:
            started = time.perf_counter()
            WAYS[asked.way](asked.folder)
            print(time.perf_counter() - started)
        return
    command = [sys.executable, "-m", "tests.bench.artifacts.bench_export", "--folder"]
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        parameters = write_checkpoint(folder, asked.layers)
        print(f"{parameters:,} parameters, {2 * parameters / GB:.2f} GB written", flush=True)
        imported = run_measured([*command, name]).peak_bytes
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        peaks: dict[str, list[int]] = {way: [] for way in WAYS}
        for _ in range(asked.rounds):
            for way in WAYS:
                os.sync()
                taken = run_measured([*command, name, "--way", way])
                seconds[way].append(float(taken.output.split()[-1]))
                peaks[way].append(taken.peak_bytes - imported)
                if way == "ours" and not (folder / "written").exists():
                    (folder / "out").rename(folder / "written")
                shutil.rmtree(folder / "out", ignore_errors=True)
    for way in WAYS:
        spent, peak = statistics.median(seconds[way]), max(peaks[way])
        record(f"{way}: seconds", spent, "s")
        record(f"{way}: peak", peak / GB, "GB")
        print(f"{way:14} {spent:6.2f} s   peak + {peak / GB:.2f} GB")
    peak = max(peaks["ours"])
    is_reached = record("export: peak", peak / GB, "GB", goal=PEAK / GB, at_most=True)
    print(f"peak at most {PEAK / GB:.2f} GB: {'reached' if is_reached else 'MISSED'}")


if __name__ == "__main__":
    main()
