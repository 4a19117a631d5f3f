"""Every recipe of a model on named hardware is valid, and fits that hardware."""

import json
import math
import re

import pytest

from penstock.cli.init.recipes import summary
from penstock.config.loading.load import loads
from penstock.engine.distributed.validate_layout import ModelDims, layout_errors
from penstock.estimate.costs.estimate import build_cost_model
from penstock.estimate.machine import world_size
from tests.cli.command import penstock
from tests.config.values import smallest
from tests.conftest import ROOT
from tests.docs.architectures import ARCHITECTURES, PARAMETERS
from tests.docs.recipes import RECIPES, load_recipe, parse_hardware, predict_costs

GALLERY = ROOT / "docs" / "recipes.md"
recipes = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_table_of_architectures_has_the_published_number_of_parameters(name):
    model = build_cost_model(loads(smallest(model={"model_path": name})), ARCHITECTURES[name])
    counted = sum(math.prod(shape) for shape in model.shapes.values())
    assert counted == pytest.approx(PARAMETERS[name], rel=0.01)


@recipes
def test_a_recipe_fits_the_memory_and_the_gpus_in_its_name(path):
    found, hardware = predict_costs(path), parse_hardware(path.stem)
    assert found.fits
    assert found.degrees.world_size == hardware.devices


@recipes
def test_the_layout_of_a_recipe_fits_its_model(path):
    run = load_recipe(path)
    dims = ModelDims.of(ARCHITECTURES[str(run.model.model_path)])
    assert layout_errors(run, world_size(run), dims) == []


@recipes
def test_a_recipe_is_named_after_what_it_does(path):
    run, name = load_recipe(path), path.stem
    assert run.pipeline.name == name
    assert run.train.output_dir == f"outputs/{name}"
    method = "qlora" if run.lora.enable_qlora else "lora" if run.lora.enable_lora else "sft"
    assert f"-{method}-" in name
    if run.train.objective == "preference":
        loss = "dpo" if run.preference.loss_type == "sigmoid" else run.preference.loss_type
        assert f"-{loss}-" in name
    size = f"{parse_hardware(name).memory / 1e9:.0f} GB"
    assert size in summary(path)


ANSWER = {"role": "assistant", "content": "4"}
RECORDS = {
    "chat": {"messages": [{"role": "user", "content": "2 + 2?"}, ANSWER]},
    "preference": {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"},
    "kto": {"prompt": "2 + 2?", "completion": "4", "label": True},
}


@pytest.mark.slow
@recipes
def test_check_accepts_a_recipe_and_plan_prints_its_estimated_memory(path, tmp_path, monkeypatch):
    run, hardware = load_recipe(path), parse_hardware(path.stem)
    [dataset] = run.data.datasets
    kind = str(dataset.type)
    (tmp_path / "model").mkdir()
    config = json.dumps(ARCHITECTURES[str(run.model.model_path)])
    (tmp_path / "model" / "config.json").write_text(config)
    (tmp_path / "data.jsonl").write_text(f"{json.dumps(RECORDS[kind])}\n" * 200)
    monkeypatch.chdir(tmp_path)
    local = ["--model.model_path", "null", "--model.config_path", "model"]
    local += ["--model.tokenizer_path", "builtin:bytes"]
    local += ["--data.datasets", f"[{{path: data.jsonl, type: {kind}}}]"]
    # Where it is not written, a run recomputes as little as the memory of its GPUs allows.
    recomputes = str(run.train.enable_gradient_checkpointing).lower()
    local += ["--train.enable_gradient_checkpointing", recomputes]
    checked = penstock("check", path, *local)
    assert checked.code == 0, checked.err
    assert "not looked at" not in checked.out + checked.err
    device = ["--device-kind", "H200"] if hardware.has_gpus else []
    planned = penstock("plan", path, *local, *device, "--json")
    assert planned.code == 0, planned.err
    memory = planned.last["costs"]["memory"]["total"]
    assert memory == pytest.approx(predict_costs(path).memory.total, rel=0.01)


def test_the_gallery_lists_every_recipe_with_its_estimated_memory():
    rows = re.findall(r"^\| `([\w.-]+)` \|.*\| ([\d.]+) GB \|$", GALLERY.read_text(), re.MULTILINE)
    computed = {path.stem: f"{predict_costs(path).memory.total / 1e9:.1f}" for path in RECIPES}
    assert dict(rows) == computed
