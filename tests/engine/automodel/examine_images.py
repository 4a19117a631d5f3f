"""Everything that must hold of an image-text type with the transformers backend, on two ranks."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.engine.hf.export import write_folders
from penstock.engine.model_source import ExportFormat
from penstock.models.automodel.family import auto_family
from penstock.models.automodel.media.traits import document_logits
from penstock.models.automodel.outline import ModelOutline
from penstock.pipeline.origins import resolve_model_source
from penstock.rows.collate import MicroBatch
from penstock.train.launch.job import CHECKPOINTS, Job
from tests.engine import loops, runs
from tests.engine.automodel.examine import Finding, write_rows
from tests.engine.automodel.tiny_images import (
    documents_of,
    labels,
    load,
    micro_batch,
    reference,
    write_image_model,
)
from tests.ranks import on_ranks

STEPS = 3
LR = 2e-3
NUMBERS = (([1, 2], [0]), ([0], [2, 0]))
"""Images of each document of the micro-batches of each rank: some ranks have images while others
have none."""


@dataclass(frozen=True, kw_only=True)
class ImageFinding(Finding):
    """What came of one model type with images."""

    files: bool
    """Whether the export has the processor's files."""

    @property
    def faults(self) -> list[str]:
        """What does not hold."""
        missing = [] if self.files else ["the export lacks the processor's files"]
        return [*super().faults, *missing]


def image_job(folder: Path, out: str, **train: Any) -> Job:
    """A run on images that trains all parts of the model in `folder`."""
    settings = {
        "max_steps": STEPS,
        "optimizer": "adamw",
        "lr": LR,
        "data_parallel_shard_size": 2,
        **train,
    }
    parts: dict[str, Any] = {
        "model_path": str(folder),
        "tokenizer_path": str(folder),
        "backend": "transformers",
    }
    if "lora" not in train:
        parts["freeze"] = []
    parts |= settings.pop("model", {})
    run = runs.run_config(folder / out, folder, model=parts, **settings)
    return replace(runs.job_of(run, folder.parent / "packed"), images=True)


def batches(folder: Path, rank: int, world_size: int = 2) -> list[MicroBatch]:
    """The micro-batches of a step of one rank."""
    model = reference(folder)
    mine = NUMBERS[rank : rank + 1] if world_size == 2 else NUMBERS
    return [micro_batch(model, one, padding=5) for each in mine for one in each]


def steps(job: Job, numbers: range, loop: Any) -> list[float]:
    """The losses of these steps on the same batches."""
    mine = batches(Path(job.config.model.model_path or ""), loop.ranks.rank, loop.ranks.world_size)
    found = []
    for number in numbers:
        found.append(loop.built.engine.step(mine, LR, number).loss)
        loop.at.step = number + 1
    return found


def trained(job: Job) -> tuple[list[float], loops.Arrays, bool]:
    """The losses of the steps, the weights after them, and whether a run that resumed before the
    last step has the same ones; the last step is saved."""
    loop = loops.loop_of(job)
    losses = steps(job, range(STEPS - 1), loop)
    loops.save(loop)
    losses += steps(job, range(STEPS - 1, STEPS), loop)
    weights = loops.parameters_of(loop)
    again = loops.loop_of(job, loop.ranks)
    again._resume()
    steps(job, range(STEPS - 1, STEPS), again)
    same = loops.parameters_of(again)
    loops.save(again)
    return losses, weights, all(np.array_equal(weights[name], same[name]) for name in weights)


def on_rank(folder: Path) -> dict[str, Any]:
    """What one of two ranks finds."""
    outline = outline_of(folder)
    losses, weights, resumes = trained(image_job(folder, "full"))
    adapted: list[float] = []
    if set(outline.linear) - {outline.head}:
        job = image_job(folder, "lora", lora={"enable_lora": True, "lora_rank": 4})
        adapted = steps(job, range(STEPS), loops.loop_of(job))
    return {"losses": losses, "weights": weights, "resumes": resumes, "lora": adapted}


def examine(folder: Path, model_type: str) -> ImageFinding:
    """What comes of a tiny model of this type. `folder` is its own; rows are beside it."""
    write_image_model(folder, model_type)
    if not (folder.parent / "packed").is_dir():
        write_rows(folder.parent)
    outline = outline_of(folder)
    found = on_ranks(2, on_rank, folder)[0]
    job = image_job(folder, "full")
    out = folder / "exported"
    saved = job.output_dir / CHECKPOINTS / f"global_step_{STEPS}"
    write_folders(saved, resolve_model_source(job.config), ExportFormat(), out)
    return ImageFinding(
        architecture=outline.architecture,
        attention=outline.traits.attention,
        head=outline.traits.head is not None,
        losses=tuple(found["losses"]),
        lora_losses=tuple(found["lora"]),
        expected_loss=expected_loss(load(folder)),
        resumes=found["resumes"],
        logits_error=_logits_error(folder, found["weights"], out / "hf"),
        files=(out / "hf" / "preprocessor_config.json").is_file(),
    )


@torch.no_grad()
def expected_loss(model: Any) -> float:
    """The mean loss of the trained tokens, one document after another."""
    total, count = 0.0, 0
    for numbers in (one for each in NUMBERS for one in each):
        for one in documents_of(model, numbers):
            wanted = labels(model, one)
            logits = document_logits(model, [one])[0]
            total += nn.functional.cross_entropy(logits, wanted, reduction="sum").item()
            count += int((wanted != -100).sum())
    return total / count


def outline_of(folder: Path) -> ModelOutline:
    """The outline of the model in a folder."""
    return auto_family(json.loads((folder / "config.json").read_text())).outline


@torch.no_grad()
def _logits_error(folder: Path, weights: loops.Arrays, exported: Path) -> float:
    model = load(folder)
    transposed = outline_of(folder).transposed
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in weights:
            value = torch.tensor(weights[name])
            is_transposed = name.endswith(".weight") and name.removesuffix(".weight") in transposed
            tensor.copy_((value.t() if is_transposed else value).reshape(tensor.shape))
    documents = documents_of(model, [2])
    wanted = document_logits(model, documents)[0]
    got = document_logits(load(exported), documents)[0]
    return float((got - wanted).norm() / wanted.norm())
