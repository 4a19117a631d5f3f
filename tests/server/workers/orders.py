"""Operations of workers over tiny models in this process, and orders for them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.core.sources.pin import pin_tokenizer
from penstock.engine.checkpoint.model_reader import CheckpointReader
from penstock.engine.distributed.ranks import init_process_group
from penstock.engine.hf.config import read_hf_config
from penstock.engine.hf.tokenizer_files import TokenizerFiles
from penstock.engine.multi_lora.shared_base import build_shared_base
from penstock.server.protocol.requests import OptimStep, Sample
from penstock.server.protocol.types import AdamParams, Array, Datum, LoraConfig, SamplingParams
from penstock.server.protocol.worker_commands import (
    CreateModelCommand,
    ForwardBackwardCommand,
    GenerateCommand,
    SaveCheckpointCommand,
    WorkerOperation,
)
from penstock.server.worker.__main__ import build_handlers
from tests.engine import runs

RANK = 16

MIXTURE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
"""What makes a tiny model one of experts."""


def write_model(folder: Path, **changes: Any) -> Path:
    """A folder of a tiny model's random weights, whose head is its own."""
    return runs.write_model(folder, **{"tie_word_embeddings": False, **changes})


def operations(model: Path, out: Path, /, **settings: Any) -> Any:
    """Operations on this rank. `settings` are the train section's, and other sections by name."""
    torch.set_num_threads(1)
    lora = {"enable_lora": True, "lora_rank": RANK, "lora_alpha": 16}
    settings = {"data_parallel_mode": "none", **settings}
    settings["lora"] = {**lora, **settings.get("lora", {})}
    settings["data"] = {"pad_to_multiple_of": 16, **settings.get("data", {})}
    settings["model"] = {"model_path": str(model), **settings.get("model", {})}
    run = runs.run_config(out, model, **settings)
    substrate = build_shared_base(
        run, read_hf_config(str(model), {}), model, init_process_group(60), lambda _: None
    )
    tokenizer = TokenizerFiles("builtin:bytes", pin_tokenizer("builtin:bytes"))
    return build_handlers(substrate, base_model="tiny", tokenizer=tokenizer)


def done(
    model: Path, out: Path, orders: Sequence[WorkerOperation], /, **settings: Any
) -> list[Any]:
    """What comes of the orders, one after another, on this rank."""
    workers = operations(model, out, **settings)
    return [workers.do(order) for order in orders]


def each_done(
    model: Path, out: Path, scripts: Sequence[Sequence[WorkerOperation]], settings: dict[str, Any]
) -> list[list[Any]]:
    """The same of several scripts, each on workers of its own."""
    return [done(model, out, orders, **settings) for orders in scripts]


def data(count: int, *, seed: int = 0, longest: int = 30, **more: float) -> tuple[Datum, ...]:
    """Samples of random tokens, some of which count; `more` are inputs by their name and scale."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        size = int(rng.integers(2, longest))
        inputs = {
            "target_tokens": Array.of(rng.integers(0, runs.VOCAB, size), "int64"),
            "weights": Array.of(rng.integers(0, 2, size), "float32"),
        }
        for name, scale in more.items():
            inputs[name] = Array.of(scale * rng.standard_normal(size), "float32")
        tokens = Array.of(rng.integers(0, runs.VOCAB, size), "int32")
        made.append(Datum(tokens=tokens, inputs=inputs))
    return tuple(made)


def passing(model: str, given: tuple[Datum, ...], **more: Any) -> ForwardBackwardCommand:
    """A pass over samples, two to a row."""
    numbers = range(len(given))
    rows = tuple(tuple(numbers[at : at + 2]) for at in range(0, len(given), 2))
    settings = {"loss": "cross_entropy", **more}
    return ForwardBackwardCommand(model=model, data=given, rows=rows, **settings)


def opening(model: str, rank: int = RANK, **more: Any) -> CreateModelCommand:
    """A model with an adapter."""
    return CreateModelCommand(model=model, lora=LoraConfig(rank=rank, **more))


def stepping(model: str, lr: float = 0.01, **more: Any) -> OptimStep:
    """A step of its optimizer."""
    return OptimStep(model=model, adam=AdamParams(learning_rate=lr, **more))


def answering(adapter: str | None = None, **more: Any) -> GenerateCommand:
    """Four of the likeliest tokens after a prompt; `more` is how."""
    how = SamplingParams(max_tokens=4, temperature=0.0, **more)
    prompt = Array.of([5, 6, 7], "int32")
    return GenerateCommand(samples=(Sample(prompt=prompt, sampling=how),), adapter=adapter)


def saving(model: str, folder: Path) -> SaveCheckpointCommand:
    """All of it to a folder."""
    return SaveCheckpointCommand(model=model, folder=str(folder), metadata={})


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors that are in a folder."""
    reader = CheckpointReader(folder)
    return reader.read(reader.shapes())


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """By how much any tensor differs, as a share of its norm."""
    assert one.keys() == other.keys()
    assert one
    worst = 0.0
    for name, tensor in one.items():
        size = tensor.norm().item()
        worst = max(worst, (tensor - other[name]).norm().item() / (size or 1.0))
    return worst
