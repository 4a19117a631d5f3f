"""What a layout computes in its first steps, and how far that is from what another does."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers

from penstock.core.sources.pin import pin_model, pin_tokenizer
from penstock.engine.hf.base_model import BaseModelWeights
from penstock.engine.hf.config import read_hf_config
from penstock.engine.hf.export import write_folders
from penstock.engine.model_source import ExportFormat, LoraArgs, ModelSource, quantization_args
from penstock.models.registry import get_family
from penstock.rows.reader import PackedRows
from penstock.train.launch.job import CHECKPOINTS, Job
from penstock_kernels.quant import QuantizedTensor, dequantize
from tests.engine import loops
from tests.engine.laid import LR, MAX_NORM
from tests.models.stored import is_published_otherwise, published

TOLD = ("aux_loss", "z_loss", "routers")
"""What a step's record may tell of routers."""

ZERO = 1e-6
"""A tensor with a smaller share of the norm of all gradients or weights than this is compared
with that share: gradients of queries and keys of documents of one token are rounding alone."""
TINY = 1e-30

OTHER_CODES = 2e-3
"""Which share of a matrix two layouts may round to other codes, after merging what they trained."""


@dataclass(frozen=True)
class Trace:
    """The first steps as they went."""

    rows: list[list[int]]
    """Of each step."""
    losses: list[float]
    norms: list[float]
    """Of gradients before they are clipped."""
    gradients: list[loops.Arrays]
    """After it."""
    weights: loops.Arrays
    told: list[dict[str, Any]] = field(default_factory=list)
    """Of routers, in each step; empty where nobody looked."""
    rounded: loops.Arrays = field(default_factory=dict[str, np.ndarray])
    """What quantized matrices stand for that adapters were merged into; `weights` lack these."""


class Errors(NamedTuple):
    """How far one trace is from another: the worst relative difference of each kind."""

    loss: float
    norm: float
    gradients: float
    weights: float

    def within(self, limits: "Errors") -> bool:
        """Whether none is beyond its limit."""
        return all(error <= limit for error, limit in zip(self, limits, strict=True))


def trace_here(job: Job) -> Trace | None:
    """The first steps of a run, on the first rank; what it started with is saved as step 0."""
    loop = loops.loop_of(job)
    loops.save(loop)
    gradients = loops.before_each_update(loop, lambda: loops.gradients_of(loop))
    rows, records = [], []
    for _ in range(steps_of(job)):
        rows.append(sorted(loop.batches.rows(loop.at.cursor).tolist()))
        records.append(loops.step(loop))
    weights = loops.parameters_of(loop)
    if not loop.ranks.is_main_process:
        return None
    rounded = _dequantized(job, weights) if job.config.lora.merge_lora_interval else {}
    losses, norms = ([record[name] for record in records] for name in ("loss", "grad_norm"))
    told = [{name: record[name] for name in TOLD if name in record} for record in records]
    return Trace(rows, losses, norms, gradients, weights, told, rounded)


def steps_of(job: Job) -> int:
    """Enough that what each updates is computed with: the first factor of an adapter moves in the
    second step, and everything else in the first."""
    return job.config.train.max_steps or (3 if job.config.lora.enable_lora else 2)


def _dequantized(job: Job, weights: loops.Arrays) -> loops.Arrays:
    """What quantized matrices stand for, the tensors of which are taken out of `weights`."""
    hf_config = read_hf_config(job.config_path, job.config.model.foundation)
    family = get_family(hf_config)
    names = family.weight_map(family.read(hf_config))
    base = BaseModelWeights(names, quantization_args(job.config), hf_config, family.roles, None)
    shapes, found = names.hf_shapes(), {}
    for name, kept in base.formats.items():
        columns = shapes[name][1]
        raw = {leaf: weights.pop(f"{name}.{leaf}") for leaf in kept.widths(columns)}
        tensors = {leaf: torch.tensor(array).to(torch.uint8) for leaf, array in raw.items()}
        value = QuantizedTensor.of_bytes(kept, columns, tensors)
        found[name] = dequantize(value, torch.float32).numpy()
    return found


def trace_of_transformers(folder: Path, kind: str, rows: list[list[int]]) -> Trace:
    """The same steps of transformers' model, with its update written out."""
    # Of soft caps and sinks transformers' sdpa knows nothing.
    attention = "eager" if kind in ("soft caps", "dense sinks") else "sdpa"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / kind, dtype=torch.float32, attn_implementation=attention
    )
    packed = PackedRows(folder / "packed" / "data" / "train")
    losses, norms, gradients = [], [], []
    for step in rows:
        loss = loss_of_transformers(model, packed, step)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        losses.append(loss.item())
        norms.append(norm.item())
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        stored = as_published(model, found).items()
        gradients.append({name: gradient.numpy().copy() for name, gradient in stored})
        with torch.no_grad():
            for name, gradient in found.items():
                model.get_parameter(name).sub_(LR * gradient)
        model.zero_grad()
    found = {name: p.detach() for name, p in model.named_parameters()}
    weights = {name: tensor.numpy() for name, tensor in as_published(model, found).items()}
    weights |= {n: b.numpy() for n, b in model.named_buffers() if n.endswith("layer_scalar")}
    return Trace(rows, losses, norms, gradients, weights)


def as_published(
    model: transformers.PreTrainedModel, tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors by the names in files, where those are others."""
    return published(model, tensors) if is_published_otherwise(model) else tensors


def loss_of_transformers(
    model: torch.nn.Module, packed: PackedRows, rows: list[int]
) -> torch.Tensor:
    """The loss of a step over these rows, one document after another: not all models of
    transformers keep documents of a row apart."""
    trained, total = 0.0, torch.zeros(())
    for number in rows:
        row = packed.row(number)
        labels = torch.tensor(row.labels, dtype=torch.int64)
        documents = torch.tensor(row.input_ids, dtype=torch.int64).split(row.lengths.tolist())
        logits = torch.cat(
            [model(input_ids=ids[None], use_cache=False).logits[0] for ids in documents]
        )
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        weights = labels != -100 if row.loss_weights is None else torch.tensor(row.loss_weights)
        total = total + (losses * weights).sum()
        trained += weights.sum().item()
    return total / trained


def errors(got: Trace, want: Trace) -> Errors:
    """How far `got` is from `want`. Tensors are compared by the norms of their differences."""
    assert got.rows == want.rows
    for here, there in zip(got.told, want.told, strict=False):
        # Counts are the same numbers, and the others sums in another order.
        assert _flat(here) == pytest.approx(_flat(there), rel=1e-5)
    assert got.rounded.keys() == want.rounded.keys()
    for name, array in want.rounded.items():
        # Sums in another order may be nearest to another code.
        others = np.abs(got.rounded[name] - array) > 1e-5 * np.abs(array).max()
        assert others.mean() <= OTHER_CODES, f"{name}: {others.sum()} of {array.size}"
    return Errors(
        loss=max(map(_relative, got.losses, want.losses)),
        norm=max(map(_relative, got.norms, want.norms)),
        gradients=max(map(_worst, got.gradients, want.gradients)),
        weights=_worst(got.weights, want.weights),
    )


def _flat(told: dict[str, Any]) -> dict[str, float]:
    plain = {**told, **told.get("routers", {}), "routers": ()}
    return {
        f"{name}[{at}]": value
        for name, values in plain.items()
        for at, value in enumerate(np.ravel(values).tolist())
    }


def _relative(got: float, want: float) -> float:
    return abs(got - want) / abs(want)


def _worst(got: loops.Arrays, want: loops.Arrays) -> float:
    assert got.keys() == want.keys()
    sizes = {name: float(np.linalg.norm(array)) for name, array in want.items()}
    floor = ZERO * math.hypot(*sizes.values())
    differences = {name: float(np.linalg.norm(got[name] - array)) for name, array in want.items()}
    return max((differences[name] / max(sizes[name], floor, TINY) for name in want), default=0.0)


def exported(job: Job) -> Mapping[str, bytes]:
    """The weights a run started with, as files that transformers loads."""
    config_path, lora = str(job.config_path), job.config.lora
    origin = ModelSource(
        config=pin_model(config_path),
        config_path=config_path,
        weights=pin_model(config_path),
        model_path=config_path,
        tokenizer=pin_tokenizer("builtin:bytes"),
        tokenizer_path="builtin:bytes",
        adapting=LoraArgs(lora.lora_alpha, "root" if lora.use_rslora else "rank", 0, lora.lora_bias)
        if lora.enable_lora
        else None,
        quantizing=quantization_args(job.config),
    )
    out = job.output_dir / "export"
    write_folders(job.output_dir / CHECKPOINTS / "global_step_0", origin, ExportFormat(), out)
    return {
        str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*.safetensors"))
    }
