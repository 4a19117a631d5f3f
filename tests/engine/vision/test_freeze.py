"""Which parts of a model are trained on images (`model.freeze`)."""

from dataclasses import replace

import numpy as np
import pytest
from safetensors.torch import load_file

from penstock.core.errors import ConfigError
from penstock.engine.hf.export import write_folders
from penstock.engine.model_source import ExportFormat
from penstock.engine.vision.build import checked_vision
from penstock.models.multimodal import is_language, text_name
from penstock.pipeline.origins import resolve_model_source
from tests.engine import runs
from tests.engine.holdings import CONFIG
from tests.engine.loops import loop_of, parameters_of
from tests.engine.vision.steps import image_job, steps, steps_of, write_model
from tests.ranks import on_ranks

PROJECTORS = ("visual.merger.", "visual.deepstack_merger_list.")
FREEZES = {
    "": None,
    "nothing": [],
    "vision": ["vision"],
    "projector": ["projector"],
    "language": ["language"],
    "all but the projector": ["vision", "language"],
}


def part_of(name):
    if is_language(name):
        return "language"
    return "projector" if any(part in name for part in PROJECTORS) else "vision"


def tensors(folder):
    return {
        name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()
    }


def each_saved(jobs):
    return {name: steps(job, saved=True) for name, job in jobs.items()}


@pytest.mark.slow
@pytest.mark.dist
def test_parts_that_are_frozen_are_not_trained_and_are_exported_as_they_were(tmp_path):
    model = write_model(tmp_path / "qwen3_vl", "qwen3_vl")
    runs.write_rows(tmp_path / "packed", 4)
    jobs = {
        name: image_job(
            tmp_path,
            name or "default",
            "qwen3_vl",
            data_parallel_mode="none",
            model={"freeze": parts},
        )
        for name, parts in FREEZES.items()
    }
    [found] = on_ranks(1, each_saved, jobs)
    was = tensors(model)
    for name, parts in FREEZES.items():
        frozen = {"vision", "projector"} if parts is None else {*parts}
        trained = {part_of(tensor) for tensor in found[name]["gradients"]}
        assert trained == {"language", "vision", "projector"} - frozen
        saved = tmp_path / (name or "default") / "checkpoints/global_step_2"
        out = tmp_path / "exported" / (name or "default")
        write_folders(saved, resolve_model_source(jobs[name].config), ExportFormat(), out)
        now = tensors(out / "hf")
        assert now.keys() == was.keys()
        changed = {part_of(text_name(n)) for n, one in now.items() if not one.equal(was[n])}
        assert changed == trained
        for tensor, value in found[name]["weights"].items():
            stored = (
                tensor.replace("model.", "model.language_model.") if is_language(tensor) else tensor
            )
            assert np.array_equal(value, now[stored].numpy())


@pytest.mark.dist
@pytest.mark.exhaustive
def test_a_run_that_starts_from_a_checkpoint_has_what_was_trained_before(tmp_path):
    write_model(tmp_path / "qwen3_vl", "qwen3_vl")
    runs.write_rows(tmp_path / "packed", 4)

    def job(name, freeze, initial=None, **more):
        made = image_job(tmp_path, name, "qwen3_vl", model={"freeze": freeze}, **more)
        return replace(made, init_checkpoint=initial)

    alone = {"data_parallel_mode": "none"}
    [first] = on_ranks(1, steps, job("first", ["vision", "language"], **alone), 1, True)
    start = tmp_path / "first/checkpoints/global_step_1"
    # Then the language model, or all: what was trained before is kept, and is exported.
    second = job("second", ["vision", "projector"], start, **alone)
    third = job("third", [], start, data_parallel_shard_size=2)
    [frozen] = on_ranks(1, started, second)
    [found, _] = on_ranks(2, started, third)
    projected = [name for name in first["weights"] if part_of(name) == "projector"]
    for name in projected:
        assert np.array_equal(frozen["weights"][name], first["weights"][name])
    assert found["begun"].keys() == first["weights"].keys()
    for name, value in first["weights"].items():
        assert np.array_equal(frozen["begun"][name], value)
        assert np.array_equal(found["begun"][name], value)
    out = tmp_path / "exported"
    saved = tmp_path / "second/checkpoints/global_step_1"
    write_folders(saved, resolve_model_source(second.config), ExportFormat(), out)
    now = tensors(out / "hf")
    for name in projected:
        assert np.array_equal(now[name].numpy(), first["weights"][name])


def started(job):
    """A run that begins with the weights of a checkpoint, and makes a step."""
    loop = loop_of(job)
    loop._resume()
    begun = parameters_of(loop)
    return {"begun": begun, **steps_of(loop, job, 1, saved=True)}


def test_parts_that_cannot_be_frozen_are_refused(tmp_path):
    for freeze, hf_type, why in (
        (["vision"], "qwen3", "models of type qwen3 are not trained on images"),
        (["language"], "qwen3_vl", "the data has no images: nothing would be trained"),
    ):
        run = runs.run_config(tmp_path / "out", tmp_path / "model", model={"freeze": freeze})
        with pytest.raises(ConfigError, match=why):
            checked_vision(run, {"model_type": hf_type}, CONFIG, images=False)


def test_what_is_not_trained_on_images_is_refused(tmp_path):
    hf_config = {"model_type": "llava"}
    how = {"mtp_loss_weight": 0.1, "pipeline_parallel_size": 2}
    run = runs.run_config(tmp_path / "out", tmp_path / "model", **how)
    with pytest.raises(ConfigError, match=r"mtp_loss_weight is 0\.1, and the data has images"):
        checked_vision(run, hf_config, CONFIG, images=True)
