"""Everything that must hold of a model type with the transformers backend, on two ranks."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from penstock.core.sources.pin import pin_model, pin_tokenizer
from penstock.engine.hf.export import write_folders
from penstock.engine.model_source import ExportFormat, ModelSource
from penstock.models.automodel.family import auto_family
from penstock.models.automodel.outline import ModelOutline
from penstock.rows.reader import PackedRows
from penstock.train.launch.job import CHECKPOINTS, Job
from tests.engine import loops, runs
from tests.engine.automodel.tiny_models import write_model
from tests.engine.traces import loss_of_transformers
from tests.ranks import on_ranks

STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What came of one model."""

    architecture: str
    attention: str
    head: bool
    losses: tuple[float, ...]
    lora_losses: tuple[float, ...]
    expected_loss: float
    """Of transformers' model, one document after another."""
    resumes: bool
    logits_error: float
    """Relative, of the exported model in transformers against the trained one."""

    @property
    def faults(self) -> list[str]:
        """What does not hold."""
        found = []
        if not all(np.isfinite(self.losses)) or self.losses[-1] >= self.losses[0]:
            found.append(f"loss does not fall: {self.losses}")
        if self.lora_losses and self.lora_losses[-1] >= self.lora_losses[0]:
            found.append(f"loss with LoRA does not fall: {self.lora_losses}")
        if not abs(self.losses[0] - self.expected_loss) <= 1e-4 * self.expected_loss:
            found.append(f"loss {self.losses[0]}, in transformers {self.expected_loss}")
        if not self.resumes:
            found.append("a resumed run has other weights")
        if not self.logits_error <= 1e-4:
            found.append(f"exported logits differ by {self.logits_error:.1e}")
        return found


@dataclass(frozen=True, kw_only=True)
class TextFinding(Finding):
    """What came of one model type."""

    model_type: str
    packing: bool


def write_rows(folder: Path) -> None:
    """Rows for `examine`."""
    runs.write_rows(folder / "packed", 4)


def job_of(folder: Path, out: str, *, adapters: dict[str, Any] | None = None, **train: Any) -> Job:
    """A run over the same rows in every step; `adapters` are settings of LoRA, None: without."""
    settings = {
        "max_steps": STEPS,
        "num_train_epochs": STEPS,
        "optimizer": "adamw",
        "lr": 2e-3,
        "lora": {"enable_lora": adapters is not None, "lora_rank": 4, **(adapters or {})},
        "model": {"model_path": str(folder), "backend": "transformers"},
        "data": {"pad_to_multiple_of": 1},
        "data_parallel_shard_size": 2,
        **train,
    }
    run = runs.run_config(folder / out, folder, **settings)
    return runs.job_of(run, folder.parent / "packed")


def trained(job: Job) -> tuple[list[float], loops.Arrays, bool] | None:
    """The losses of the steps, the weights after them, and whether a run that resumed before the
    last step has the same ones; the last step is saved."""
    loop = loops.loop_of(job)
    losses = []
    for step in range(STEPS):
        if step == STEPS - 1:
            loops.save(loop)
        losses.append(loops.step(loop)["loss"])
    weights = loops.parameters_of(loop)
    again = loops.loop_of(job, loop.ranks)
    again._resume()
    loops.step(again)
    same = loops.parameters_of(again)
    loops.save(again)
    is_same = all(np.array_equal(weights[name], same[name]) for name in weights)
    return (losses, weights, is_same) if loop.ranks.is_main_process else None


def losses_with_lora(job: Job) -> list[float]:
    """The losses of the steps with adapters."""
    loop = loops.loop_of(job)
    return [loops.step(loop)["loss"] for _ in range(STEPS)]


def on_rank(folder: Path) -> dict[str, Any] | None:
    """What one of two ranks finds."""
    outline = _outline(folder)
    found = trained(job_of(folder, "full"))
    adapted = []
    if set(outline.linear) - {outline.head}:
        adapted = losses_with_lora(job_of(folder, "lora", adapters={}))
    if found is None:
        return None
    return {"losses": found[0], "weights": found[1], "resumes": found[2], "lora": adapted}


def examine(folder: Path, model_type: str) -> TextFinding:
    """What comes of a tiny model of this type. `folder` is its own; rows are beside it."""
    write_model(folder, model_type)
    outline = _outline(folder)
    found = next(one for one in on_ranks(2, on_rank, folder) if one)
    exported = export(folder, job_of(folder, "full"), STEPS)
    with torch.no_grad():
        expected = loss_of_transformers(
            _load(folder), PackedRows(folder.parent / "packed" / "data" / "train"), [0, 1, 2, 3]
        )
    return TextFinding(
        model_type=model_type,
        architecture=outline.architecture,
        attention=outline.traits.attention,
        packing=outline.traits.packing,
        head=outline.traits.head is not None,
        losses=tuple(found["losses"]),
        lora_losses=tuple(found["lora"]),
        expected_loss=expected.item(),
        resumes=found["resumes"],
        logits_error=_logits_error(folder, found["weights"], exported),
    )


def _outline(folder: Path) -> ModelOutline:
    return auto_family(json.loads((folder / "config.json").read_text())).outline


def _load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def _logits_error(folder: Path, weights: loops.Arrays, exported: Path) -> float:
    model = _load(folder)
    transposed = _outline(folder).transposed
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in weights:
            value = torch.tensor(weights[name])
            is_transposed = name.endswith(".weight") and name.removesuffix(".weight") in transposed
            tensor.copy_((value.t() if is_transposed else value).reshape(tensor.shape))
    ids = torch.arange(8, 40)[None]
    wanted = model(input_ids=ids, use_cache=False).logits
    got = _load(exported)(input_ids=ids, use_cache=False).logits
    return float((got - wanted).norm() / wanted.norm())


def export(folder: Path, job: Job, step: int) -> Path:
    """The exported model of a checkpoint."""
    path = str(folder)
    origin = ModelSource(
        config=pin_model(path),
        config_path=path,
        weights=pin_model(path),
        model_path=path,
        tokenizer=pin_tokenizer("builtin:bytes"),
        tokenizer_path="builtin:bytes",
        backend="transformers",
    )
    out = job.output_dir / "export"
    write_folders(job.output_dir / CHECKPOINTS / f"global_step_{step}", origin, ExportFormat(), out)
    return out / "hf"
