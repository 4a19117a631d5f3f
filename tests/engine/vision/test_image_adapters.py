"""Adapters of models that are trained on images, judged by PEFT."""

from dataclasses import replace

import numpy as np
import pytest
from peft import PeftModel

from penstock.adapters.names import parse_lora_name
from penstock.core.errors import ConfigError
from penstock.core.files import read_json
from penstock.engine.hf.export import write_folders
from penstock.engine.model_source import ExportFormat
from penstock.estimate.machine import check_adapted_layers
from penstock.export.merge import merge_folders
from penstock.models.vision.types import is_vision
from penstock.pipeline.origins import resolve_model_source, with_adapter
from tests.engine import runs
from tests.engine.loops import loop_of, parameters_of
from tests.engine.vision.steps import image_job, loaded, logits, steps, write_model
from tests.ranks import on_ranks

LAYERS = {
    "qwen2_5_vl": ["visual.blocks.*.attn.qkv", "visual.merger.mlp.0"],
    "llava": ["vision_tower.encoder.layers.0.self_attn.q_proj", "multi_modal_projector.linear_2"],
}
TARGETS = {"language": ["q_proj", "up_proj"], "vision": ["q_proj"]}


def adapted(folder, name, model_type, more=(), **train):
    targets = [*TARGETS[name], *(LAYERS[model_type] if name == "vision" else ())]
    lora = {"enable_lora": True, "lora_rank": 4, "lora_target_modules": targets, **dict(more)}
    settings = {"model": {"freeze": None}, "weight_decay": 0.0, "data_parallel_mode": "none"}
    return image_job(folder, f"{model_type} {name}", model_type, lora=lora, **settings | train)


def each_saved(jobs):
    return {name: steps(job, saved=True) for name, job in jobs.items()}


def initial(job):
    return parameters_of(loop_of(job))


def assert_close(found, wanted):
    assert (found - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.mark.dist
@pytest.mark.parametrize(
    "model_type", ["qwen2_5_vl", pytest.param("llava", marks=pytest.mark.exhaustive)]
)
def test_adapters_are_of_the_language_model_and_of_what_is_named_and_peft_computes_the_same(
    tmp_path, model_type
):
    runs.write_rows(tmp_path / "packed", 4)
    write_model(tmp_path / model_type, model_type)
    jobs = {f"{model_type} {name}": adapted(tmp_path, name, model_type) for name in TARGETS}
    for job in jobs.values():
        check_adapted_layers(job.config)
    [found] = on_ranks(1, each_saved, jobs)
    others = {}
    for name, job in jobs.items():
        _, kind = name.split()
        factors = map(parse_lora_name, found[name]["gradients"])
        trained = {factor.hf_module for factor in factors if factor}
        of_vision = [layer for layer in trained if is_vision(layer)]
        assert len(of_vision) == {"language": 0, "vision": 3 if "qwen" in model_type else 2}[kind]
        model, out = tmp_path / model_type, tmp_path / name / "exported"
        saved = tmp_path / name / "checkpoints/global_step_2"
        write_folders(saved, resolve_model_source(job.config), ExportFormat(), out)
        was = logits(loaded(model), model_type)
        ours = logits(loaded(out / "hf"), model_type)
        assert (ours - was).norm() > 1e-3 * was.norm()
        peft = PeftModel.from_pretrained(loaded(model), out / "adapter")
        assert_close(logits(peft, model_type), ours)
        targets = read_json(out / "adapter/adapter_config.json")["target_modules"]
        assert {target for target in targets if is_vision(target)} == {*of_vision}
        merge_folders(model, out / "adapter", out / "merged")
        assert_close(logits(loaded(out / "merged"), model_type), ours)
        # Another run goes on from it.
        lora = {"enable_lora": True, "init_adapter_path": str(out / "adapter")}
        again = image_job(tmp_path, f"{name} again", model_type, lora=lora, model={"freeze": None})
        again = runs.job_of(
            with_adapter(again.config), tmp_path / "packed", adapter=out / "adapter"
        )
        others[name] = again
    [begun] = on_ranks(1, each_initial, others)
    for name in others:
        wanted = found[name]["weights"]
        for tensor in filter(parse_lora_name, wanted):
            assert np.array_equal(begun[name][tensor], wanted[tensor]), tensor


def each_initial(jobs):
    return {name: initial(replace(job, images=True)) for name, job in jobs.items()}


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", LAYERS)
def test_adapters_of_a_vision_part_are_the_same_in_every_layout(tmp_path, model_type):
    write_model(tmp_path / model_type, model_type)
    runs.write_rows(tmp_path / "packed", 4)
    job = adapted(tmp_path, "vision", model_type)
    [alone] = on_ranks(1, steps, job)
    for axes in (
        {"data_parallel_mode": "fsdp2", "data_parallel_shard_size": 2},
        {"data_parallel_mode": "fsdp2", "tensor_parallel_size": 2},
        {"data_parallel_mode": "fsdp2", "tensor_parallel_size": 2, "sequence_parallel": True},
        {"data_parallel_mode": "fsdp2", "pipeline_parallel_size": 2},
    ):
        for found in on_ranks(2, steps, adapted(tmp_path, "vision", model_type, **axes)):
            assert found["loss"] == pytest.approx(alone["loss"], rel=1e-5)
            assert found["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5)
            assert found["gradients"].keys() == alone["gradients"].keys()
            for tensor, value in alone["weights"].items():
                error = np.linalg.norm(found["weights"][tensor] - value)
                assert error <= 2e-5 * np.linalg.norm(value), tensor


def test_options_that_adapters_of_a_vision_part_have_not_are_refused(tmp_path):
    write_model(tmp_path / "llava", "llava")
    runs.write_rows(tmp_path / "packed", 4)
    for more, why in (
        ({"lora_dropout": 0.1}, "lora_dropout is 0.1, and .* names layers of the vision part"),
        ({"lora_bias": "all"}, "lora_bias is all, and .* names layers of the vision part"),
    ):
        with pytest.raises(ConfigError, match=why):
            loop_of(adapted(tmp_path, "vision", "llava", more))
    wrong = {"lora_target_modules": ["vision_tower.blocks.0"]}
    with pytest.raises(ConfigError, match=r"'vision_tower.blocks.0' names no linear layer"):
        check_adapted_layers(adapted(tmp_path, "vision", "llava", wrong).config)
