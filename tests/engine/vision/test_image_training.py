"""Training on images: steps, layouts and exports, judged by transformers and by one process."""

import numpy as np
import pytest
import torch
from torch import nn

from penstock.core.files import read_json
from penstock.engine.hf.export import write_folders
from penstock.engine.hf.safetensors_reader import SafetensorsFolder
from penstock.engine.model_source import ExportFormat
from penstock.models.decoder import Decoder
from penstock.pipeline.origins import resolve_model_source
from tests.engine import runs
from tests.engine.loops import loop_of
from tests.engine.vision.steps import (
    DECAY,
    LR,
    MAX_NORM,
    NUMBERS,
    batches,
    each_steps,
    image_job,
    loaded,
    logits,
    steps,
    steps_of,
    write_model,
)
from tests.models.images import image_documents, their_logits
from tests.ranks import on_ranks

MOE = ("ernie4_5_vl_moe", "glm4v", "glm4v_moe", "qwen3_5_moe", "qwen3_vl_moe")


def stored_shapes(folder):
    """The shapes of all tensors in files, by name."""
    with SafetensorsFolder(folder) as files:
        return {name: files.stored(name).shape for name in files.names()}


def their_steps(model, model_type, count=2):
    """The same steps by transformers and torch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=DECAY)
    found = {"loss": [], "grad_norm": []}
    rows = [image_documents(model_type, one) for one in NUMBERS]
    documents = [one for row in rows for one in zip(*row, strict=True)]
    trained = sum(int((labels != -100).sum()) for _, labels, _ in documents)
    for _ in range(count):
        total = 0.0
        for ids, labels, images in documents:
            logits = their_logits(model, ids, images)
            loss = nn.functional.cross_entropy(logits, labels, reduction="sum") / trained
            loss.backward()
            total += loss.item()
        found["loss"].append(total)
        found["grad_norm"].append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return found


def assert_close(found, wanted, limit=1e-5):
    """Relative to the norm of all of it."""
    error = (found - wanted).norm()
    assert error <= limit * wanted.norm(), f"{error / wanted.norm():.1e}"


@pytest.mark.dist
@pytest.mark.parametrize(
    "model_type",
    [
        "qwen2_5_vl",
        *(
            pytest.param(one, marks=pytest.mark.exhaustive)
            for one in ("llava", "llava_onevision", "gemma3", "idefics3", "smolvlm", *MOE)
        ),
    ],
)
def test_steps_and_what_is_exported_are_those_of_transformers(tmp_path, model_type):
    model = write_model(tmp_path / model_type, model_type)
    runs.write_rows(tmp_path / "packed", 4)
    job = image_job(tmp_path, "run", model_type, data_parallel_mode="none")
    [found] = on_ranks(1, steps, job, 2, True)
    theirs = loaded(model)
    wanted = their_steps(theirs, model_type)
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
    out = tmp_path / "exported"
    saved = tmp_path / "run/checkpoints/global_step_2"
    write_folders(saved, resolve_model_source(job.config), ExportFormat(), out)
    ours = loaded(out / "hf")
    for name, tensor in theirs.state_dict().items():
        assert_close(ours.state_dict()[name], tensor)
    assert_close(logits(ours, model_type), logits(theirs, model_type))
    assert read_json(out / "hf/config.json") == read_json(model / "config.json")
    assert stored_shapes(out / "hf") == stored_shapes(model)
    for file in ("preprocessor_config.json", "tokenizer.json"):
        assert (out / "hf" / file).read_bytes() == (model / file).read_bytes()


ALONE = {"data_parallel_mode": "none"}
LAYOUTS = {
    "fsdp2 2": {"data_parallel_shard_size": 2},
    "ddp 2": {"data_parallel_mode": "ddp", "data_parallel_replicate_size": 2},
    "tp 2, sequence parallel": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "ring 2": {"ringattn_parallel_size": 2},
    "tp 2": {"tensor_parallel_size": 2},
    "ulysses 2": {"ulysses_parallel_size": 2},
    "pp 2": {"pipeline_parallel_size": 2},
    "fsdp2 2, zero 2": {"data_parallel_shard_size": 2, "zero_stage": 2},
    "fsdp2 2, frozen tower": {"data_parallel_shard_size": 2, "model": {"freeze": ["vision"]}},
}
OF_EXPERTS = {
    "ep 2": {"data_parallel_shard_size": 2, "expert_parallel_size": 2},
    **{name: LAYOUTS[name] for name in ("fsdp2 2", "tp 2, sequence parallel", "tp 2", "ring 2")},
    "pp 2": LAYOUTS["pp 2"],
}
PAIRS = {
    "replicate 2 x shard 2": {"data_parallel_replicate_size": 2, "data_parallel_shard_size": 2},
    "shard 2 x tp 2": {
        **{"data_parallel_shard_size": 2, "tensor_parallel_size": 2},
        "sequence_parallel": True,
    },
    "pp 2 x shard 2": {"pipeline_parallel_size": 2, "data_parallel_shard_size": 2},
    "ring 2 x shard 2": {"ringattn_parallel_size": 2, "data_parallel_shard_size": 2},
    "pp 2 x ddp 2": {
        **{"pipeline_parallel_size": 2, "data_parallel_replicate_size": 2},
        "data_parallel_mode": "ddp",
    },
}
EXHAUSTIVE = (
    *("qwen2_5_vl", "llava", "llava_next", "llava_onevision", "mistral3", "gemma3"),
    *("idefics3", "smolvlm", "internvl", "qwen2_vl", "qwen3_5"),
)
OFTEN = ("fsdp2 2", "tp 2, sequence parallel")


@pytest.mark.dist
@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("qwen3_vl", OFTEN),
        *(pytest.param(one, [*LAYOUTS], marks=pytest.mark.exhaustive) for one in EXHAUSTIVE),
    ],
    ids=["qwen3_vl", *EXHAUSTIVE],
)
def test_layouts_compute_what_one_process_computes(tmp_path, model_type, names):
    compare(tmp_path, model_type, {name: LAYOUTS[name] for name in names}, 2)


def computed_patches(job):
    """Patches that this rank computes in a step, by micro-batch."""
    loop, found = loop_of(job), []
    [part] = loop.built.engine.model.parts
    assert isinstance(part, Decoder)
    assert part.vision
    tower = part.vision.hf_model
    features = tower.get_image_features

    def counted(**tensors):
        found.append(len(tensors["pixel_values"]))
        return features(**tensors)

    tower.get_image_features = counted
    steps_of(loop, job, 1)
    return found


@pytest.mark.dist
def test_ranks_that_share_the_tokens_divide_the_images(tmp_path):
    write_model(tmp_path / "qwen2_5_vl", "qwen2_5_vl")
    runs.write_rows(tmp_path / "packed", 4)
    job = image_job(tmp_path, "run", "qwen2_5_vl", **LAYOUTS["tp 2"])
    mine = on_ranks(2, computed_patches, job)
    blank = 4
    images = [one.images for one in batches("qwen2_5_vl")]
    one, _, three, two = (len(each.tensors["pixel_values"]) if each else 0 for each in images)
    total = [sum(each) for each in zip(*mine, strict=True)]
    assert total == [one + blank, 2 * blank, three, two]
    assert all(0 < each[2] < three for each in mine)


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "llava", "gemma3"])
def test_two_axes_compute_what_one_process_computes(tmp_path, model_type):
    compare(tmp_path, model_type, PAIRS, 4)


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", MOE)
def test_layouts_of_experts_compute_what_one_process_computes(tmp_path, model_type):
    layouts = {
        name: how for name, how in OF_EXPERTS.items() if name != "ep 2" or model_type != "glm4v"
    }
    compare(tmp_path, model_type, layouts, 2)


@pytest.mark.dist
def test_experts_of_images_on_two_ranks_compute_what_one_process_computes(tmp_path):
    compare(tmp_path, "ernie4_5_vl_moe", {"ep 2": OF_EXPERTS["ep 2"]}, 2)


def compare(tmp_path, model_type, layouts, world, run=each_steps, **train):
    """Losses, norms, gradients and weights of every layout with those of one process."""
    write_model(tmp_path / model_type, model_type)
    runs.write_rows(tmp_path / "packed", 4)
    jobs = {
        name: image_job(tmp_path, name, model_type, **train, **how) for name, how in layouts.items()
    }
    found = on_ranks(world, run, jobs)
    alone: dict[tuple[str, ...], dict] = {}
    frozen = {n: tuple(how.get("model", {}).get("freeze", ())) for n, how in layouts.items()}
    for parts in set(frozen.values()):
        how = {"model": {"freeze": list(parts)}, **train, **ALONE}
        job = image_job(tmp_path, "alone", model_type, **how)
        [ones] = on_ranks(1, run, {"alone": job})
        alone[parts] = ones["alone"]
    for ranks in found:
        for name, one in ranks.items():
            wanted = alone[frozen[name]]
            assert one["loss"] == pytest.approx(wanted["loss"], rel=1e-5), name
            assert one["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5), name
            for kind in ("gradients", "weights"):
                assert one[kind].keys() == wanted[kind].keys()
                norm = max(np.linalg.norm(value) for value in wanted[kind].values())
                for tensor, value in wanted[kind].items():
                    error = np.linalg.norm(one[kind][tensor] - value)
                    # Of what is 0 but for rounding, such as biases of keys, digits differ.
                    least = 1e-7 * norm
                    assert error <= 2e-5 * np.linalg.norm(value) + least, f"{name}: {tensor}"
