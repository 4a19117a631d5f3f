"""Optimizer steps on micro-batches with images, in any layout."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from penstock.engine.hf.config import read_hf_config
from penstock.rows.collate import MicroBatch
from penstock.rows.tokenizer import load_tokenizer
from penstock.train.launch.job import Job
from penstock.train.trainer import Trainer
from tests.engine import runs
from tests.engine.loops import before_each_update, gradients_of, loop_of, parameters_of, save
from tests.models.images import image_documents, image_model, micro_batch, their_logits

NUMBERS = ([1, 0], [0], [3], [0, 2])
"""Images of each document of the micro-batches of a step: on two replicas some have images while
others have none."""
LENGTH = 200
LR, MAX_NORM, DECAY = 0.5, 0.5, 0.1


def write_model(folder: Path, model_type: str) -> Path:
    """A checkpoint that transformers wrote, with a tokenizer and a processor."""
    image_model(model_type).save_pretrained(folder, max_shard_size="50KB")
    load_tokenizer("builtin:bytes").save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{ "size":  {"height": 32} }')
    return folder


def batches(model_type: str) -> list[MicroBatch]:
    """The micro-batches of a step."""
    return [micro_batch(*image_documents(model_type, one), length=LENGTH) for one in NUMBERS]


def image_job(folder: Path, name: str, model_type: str, **train: Any) -> Job:
    """A run on the model in `folder`, which trains all parts unless it says otherwise."""
    model = folder / model_type
    settings: dict[str, Any] = {
        "optimizer": "sgd",
        "optimizer_kwargs": {"momentum": 0.9},
        "lr": LR,
        "max_grad_norm": MAX_NORM,
        "weight_decay": DECAY,
        "global_batch_size": len(NUMBERS),
        "max_steps": 2,
        **train,
    }
    parts = {"model_path": str(model), "tokenizer_path": str(model), "freeze": []}
    parts = {**parts, **settings.pop("model", {})}
    run = runs.run_config(folder / name, model, model=parts, **settings)
    return replace(runs.job_of(run, folder / "packed"), images=True)


def steps(job: Job, count: int = 2, saved: bool = False, resumed: bool = False) -> dict[str, Any]:
    """Losses, norms, first gradients and last weights of a run, which may go on from its
    checkpoint."""
    loop = loop_of(job)
    if resumed:
        loop._resume()
    return steps_of(loop, job, count, saved=saved)


def steps_of(
    loop: Trainer,
    job: Job,
    count: int,
    *,
    saved: bool = False,
    make: Callable[[str], list[MicroBatch]] = batches,
) -> dict[str, Any]:
    """`steps` of a run that is built; `make` gives the micro-batches for a model type."""
    first = loop.at.step
    model_type = read_hf_config(job.config_path, {})["model_type"]
    model, dims = loop.built.engine.model, loop.built.dims
    at = model.mesh.index("replicate", "shard")
    each = len(NUMBERS) // dims.num_replicas
    mine = make(model_type)[at * each : (at + 1) * each]
    seen = before_each_update(loop, lambda: gradients_of(loop))
    results = [loop.built.engine.step(mine, LR, number) for number in range(first, first + count)]
    if saved:
        loop.at.step = first + count
        save(loop)
    return {
        "loss": [one.loss for one in results],
        "grad_norm": [one.grad_norm for one in results],
        "gradients": seen[0],
        "weights": parameters_of(loop),
    }


def each_steps(jobs: dict[str, Job]) -> dict[str, Any]:
    """`steps` of several runs for the price of one start of the ranks."""
    torch.set_num_threads(1)
    return {name: steps(job) for name, job in jobs.items()}


def loaded(folder: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)


def logits(model: Any, model_type: str) -> torch.Tensor:
    """Of two documents, one with images."""
    ids, _, images = image_documents(model_type, [2, 0])
    with torch.no_grad():
        return torch.cat([their_logits(model, *one) for one in zip(ids, images, strict=True)])
