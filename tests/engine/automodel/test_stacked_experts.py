"""Adapters of stacked experts: PEFT computes the same with them, and so does the merged model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from penstock.adapters.inject import LoraSpec, inject
from penstock.core.sources.pin import pin_model, pin_tokenizer
from penstock.engine.hf.export import write_folders
from penstock.engine.model_source import ExportFormat, LoraArgs, ModelSource
from penstock.models.automodel.causal_lm import AutoCausalLM
from penstock.models.automodel.family import auto_family
from penstock.models.automodel.outline import AutoModelConfig
from penstock.rows.reader import PackedRows
from penstock.train.launch.job import CHECKPOINTS, Job
from tests.engine import loops
from tests.engine.automodel import examine, tiny_models
from tests.engine.traces import loss_of_transformers
from tests.ranks import on_ranks

ADAPTERS = {"lora_alpha": 32}


def _job(folder: Path, out: str = "adapted", **train: Any) -> Job:
    return examine.job_of(folder, out, adapters={"lora_alpha": 32}, max_steps=4, **train)


def _trained(folder: Path) -> tuple[list[float], bool, float]:
    """The losses of three steps, whether a resumed run has the same weights, and the loss after."""
    found = examine.trained(_job(folder))
    again = loops.loop_of(_job(folder))
    again._resume()
    losses, _, resumes = found or ([], {}, True)
    return losses, resumes, loops.step(again)["loss"]


def _continued(folder: Path, adapter: Path) -> float:
    """The first loss of a run that starts at the adapter."""
    job = _job(folder, "again", data_parallel_shard_size=1)
    return loops.step(loops.loop_of(replace(job, adapter=adapter)))["loss"]


def _exported(folder: Path) -> Path:
    job, path = _job(folder), str(folder)
    origin = ModelSource(
        config=pin_model(path),
        config_path=path,
        weights=pin_model(path),
        model_path=path,
        tokenizer=pin_tokenizer("builtin:bytes"),
        tokenizer_path="builtin:bytes",
        backend="transformers",
        adapting=LoraArgs(job.config.lora.lora_alpha, "rank", 0, "none"),
    )
    out = job.output_dir / "export"
    checkpoint = job.output_dir / CHECKPOINTS / f"global_step_{examine.STEPS}"
    write_folders(checkpoint, origin, ExportFormat(), out)
    return out


@torch.no_grad()
def _logits(model: torch.nn.Module) -> torch.Tensor:
    return model.eval()(input_ids=torch.arange(8, 40)[None], use_cache=False).logits


# With a dense layer and shared experts; transposed; padded batches.
@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    [
        "deepseek_v3",
        pytest.param("gpt_oss", marks=pytest.mark.exhaustive),
        pytest.param("qwen3_next", marks=pytest.mark.exhaustive),
    ],
)
def test_an_adapter_of_experts_is_the_same_in_peft_and_merged(tmp_path, model_type):
    folder = tmp_path / "model"
    examine.write_rows(tmp_path)
    tiny_models.write_model(folder, model_type, noise=0.1)
    (losses, resumes, loss), _ = on_ranks(2, _trained, folder)
    assert losses[-1] < losses[0]
    assert resumes
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    out = _exported(folder)
    adapted = peft.PeftModel.from_pretrained(base, out / "adapter")
    stacked = [n for n, _ in adapted.named_parameters() if ".experts." in n and "lora_B" in n]
    assert stacked
    assert all(adapted.get_parameter(name).abs().max() > 0 for name in stacked)
    rows = PackedRows(tmp_path / "packed" / "data" / "train")
    with torch.no_grad():
        of_peft = loss_of_transformers(adapted.eval(), rows, [0, 1, 2, 3]).item()
    assert of_peft == pytest.approx(loss, rel=1e-5)
    assert on_ranks(1, _continued, folder, out / "adapter") == [pytest.approx(loss, rel=1e-5)]
    wanted = _logits(adapted)
    merged = transformers.AutoModelForCausalLM.from_pretrained(out / "hf", dtype=torch.float32)
    assert (_logits(merged) - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_oss"])
def test_biases_of_adapted_layers_are_trained_and_not_those_of_norms(model_type):
    values = {**tiny_models.tiny_config(model_type).to_dict(), "model_type": model_type}
    family = auto_family(values)
    config = family.read(values)
    assert isinstance(config, AutoModelConfig)
    model = AutoCausalLM(values, config)
    spec = LoraSpec(4, 8, family.lora_targets, bias="lora_only")
    with torch.device("meta"):
        chosen = inject(model, spec)
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    biases = {name for name in learning if name.endswith(".bias")}
    assert biases
    assert {name.removesuffix(".bias") for name in biases} <= set(chosen)
