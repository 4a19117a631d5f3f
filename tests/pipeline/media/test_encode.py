"""Features of images that are computed once: the stage `encode`, and training on what it stores."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from penstock.config.loading.load import load
from penstock.core.cache.stage import stage_key
from penstock.models.vision.features import FEATURES, PIXELS
from penstock.pipeline.plan import plan
from penstock.rows.image_files import MEDIA, ImageFiles
from tests.cli.command import penstock
from tests.media.pictures import picture
from tests.pipeline.media.test_image_chain import CONVERSATIONS, write_model
from tests.pipeline.runs import write_run
from tests.stages.prepare.media.test_images import asking, write_data
from tests.stages.prepared import write_lines
from tests.turns import one_day_in

MANY = [asking(f"n{n}.jpg", answer=f"It is {n}.") for n in range(200)]
"""More images than a file of features holds."""

SLOW = """
import sys, time
from penstock.cli.main import main
from penstock.encode.features import Features
write, count = Features._write, []
def slow(self, part, digests):
    count.append(part)
    if len(count) == 2:
        print("second file", flush=True)
        time.sleep(600)
    return write(self, part, digests)
Features._write = slow
main(["encode", sys.argv[1]])
"""
"""Stops while it writes the second file."""


def picture_files(folder, count):
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(count):
        (folder / f"n{n}.jpg").write_bytes(picture(n, 28, 28, "JPEG"))


def sections_of(tmp_path, family="qwen2_5_vl", conversations=CONVERSATIONS, **data):
    model = tmp_path / "model"
    if not model.exists():
        write_model(model, family)
    written = write_data(tmp_path / "data", conversations)
    if conversations is MANY:
        picture_files(tmp_path / "data", len(MANY))
    return {
        "model": {"model_path": str(model), "config_path": None, "foundation": {}},
        "data": {
            "datasets": [{"path": str(written), "type": "chat"}],
            "sample_packing_sequence_len": 128,
            "val_set_size": 2,
            "encode_images": True,
            **data,
        },
        "train": {"global_batch_size": 2, "num_train_epochs": 1, "enable_mixed_precision": False},
    }


def ran(tmp_path, sections, *words):
    [command] = words or ("run",)
    said = penstock(command, write_run(tmp_path, **sections), "--json")
    assert said.code == 0, said.err
    return {one["stage"]: one for one in said.last["stages"]}


def features_of(stages):
    folder = Path(stages["encode"]["path"])
    files = sorted((folder / MEDIA).glob("*.arrow"))
    return {file.name: file.read_bytes() for file in files}


def steps(folder, sections, **more):
    planned = plan(load(write_run(folder, **{**sections, **more})))
    return {step.stage.name: stage_key(step.stage) for step in planned.steps}


@pytest.mark.dist
@pytest.mark.exhaustive
def test_a_run_on_features_is_the_run_on_images(tmp_path):
    sections = sections_of(tmp_path)
    images = {**sections, "data": {**sections["data"], "encode_images": False}}
    found = {}
    for name, each in (("features", sections), ("images", images)):
        stages = ran(tmp_path / name, each)
        [metrics] = (tmp_path / name).glob("out/metrics.jsonl")
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        losses = [one[part] for one in lines for part in ("loss", "eval_loss") if part in one]
        weights = Path(stages["export"]["path"]) / "hf/model.safetensors"
        found[name] = losses, load_file(weights)
        assert ("encode" in stages) == (name == "features")
        media = sorted((Path(stages["pack"]["path"]) / MEDIA).glob("*.arrow"))
        stored = ImageFiles(media)
        inputs = stored.inputs(stored.digests())[0]
        assert (FEATURES in inputs, PIXELS in inputs) == (name == "features", name == "images")
    (on_features, exported), (on_images, wanted) = found["features"], found["images"]
    assert on_features == pytest.approx(on_images, rel=1e-6)
    assert exported.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(exported[name], value, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_an_image_that_is_added_is_the_only_one_encoded(tmp_path):
    sections = sections_of(tmp_path, conversations=MANY)
    first = ran(tmp_path, sections, "encode")
    assert first["encode"]["facts"] == {"images": len(MANY), "encoded": len(MANY)}
    again = [*MANY[:-1], asking(f"n{len(MANY)}.jpg", f"n{len(MANY) - 1}.jpg", text="And now?")]
    picture_files(tmp_path / "data", len(MANY) + 1)
    write_lines(tmp_path / "data/data.jsonl", [{"messages": one} for one in again])
    second = ran(tmp_path, sections, "encode")
    assert second["encode"]["facts"] == {"images": len(MANY) + 1, "encoded": 1}
    texts = [asking(f"n{n}.jpg", text="Other text.") for n in range(len(MANY))]
    write_lines(tmp_path / "data/data.jsonl", [{"messages": one} for one in texts])
    third = ran(tmp_path, sections, "encode")
    assert third["encode"]["facts"] == {"images": len(MANY), "encoded": 0}
    assert third["encode"]["key"] != first["encode"]["key"]
    assert features_of(third) == features_of(first)


@one_day_in(2, of=1)
def test_a_stage_that_is_killed_continues_and_stores_the_same(tmp_path):
    sections = sections_of(tmp_path, conversations=MANY)
    ran(tmp_path, sections, "prepare")
    config = write_run(tmp_path, **sections)
    with subprocess.Popen(
        [sys.executable, "-c", SLOW, str(config)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"second file\n"
        process.kill()
    assert process.returncode == -signal.SIGKILL
    shared = tmp_path / "prepared/features"
    assert len([*shared.glob("*/*.arrow")]) == 1
    resumed = ran(tmp_path, sections, "encode")["encode"]
    assert (resumed["status"], resumed["facts"]["encoded"]) == ("resumed", len(MANY))
    other = {**sections, "data": {**sections["data"], "dataset_prepared_path": f"{tmp_path}/whole"}}
    whole = ran(tmp_path, other, "encode")
    assert features_of(whole) == features_of({"encode": resumed})
    assert whole["encode"]["facts"] == resumed["facts"]


def test_keys_are_of_the_tower_and_the_dtype_and_those_of_other_runs_are_unchanged(tmp_path):
    sections = sections_of(tmp_path)
    plain = {**sections, "data": {**sections["data"], "encode_images": False}}
    with_features, without = steps(tmp_path, sections), steps(tmp_path, plain)
    assert list(with_features) == ["prepare", "encode", "pack", "train", "export"]
    assert list(without) == ["prepare", "pack", "train", "export"]
    assert with_features["prepare"] == without["prepare"]
    assert with_features["pack"] != without["pack"]
    halves = steps(tmp_path, sections, data={**sections["data"], "encode_dtype": "bfloat16"})
    assert halves["encode"] != with_features["encode"]
    longer = steps(tmp_path, sections, data={**sections["data"], "sample_packing_sequence_len": 99})
    assert longer["encode"] == with_features["encode"]
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps({**config, "note": 1}))
    assert steps(tmp_path, sections)["encode"] != with_features["encode"]


def test_features_in_bfloat16_are_those_in_float32_rounded(tmp_path):
    sections = sections_of(tmp_path, conversations=CONVERSATIONS)
    full = ran(tmp_path, sections, "encode")
    half = ran(
        tmp_path, {**sections, "data": {**sections["data"], "encode_dtype": "bfloat16"}}, "encode"
    )
    files = [ImageFiles.in_folder(Path(one["encode"]["path"]) / MEDIA) for one in (full, half)]
    assert files[0].digests() == files[1].digests()
    for digest in files[0].digests():
        exact, rounded = (torch.tensor(one.inputs([digest])[0][FEATURES].numpy()) for one in files)
        assert rounded.dtype == torch.int16
        close = rounded.view(torch.bfloat16).float()
        torch.testing.assert_close(close, exact, rtol=0.05, atol=0.05 * exact.abs().max().item())


REFUSED = {
    "trained tower": ({"model": {"freeze": ["projector"]}}, "leaves the vision tower trained"),
    "nothing frozen": ({"model": {"freeze": []}}, "write freeze: ['vision']"),
    "transformers": ({"model": {"backend": "transformers"}}, "write backend: native"),
    "no weights": ({"model": {"model_path": None}}, "there are no weights to encode images with"),
    "another start": ({"train": {"load_checkpoint_path": "x"}}, "may be another than that"),
    "dtype alone": (
        {"data": {"encode_images": False, "encode_dtype": "float32"}},
        "write encode_images: true",
    ),
    "stage alone": (
        {"data": {"encode_images": False}, "pipeline": {"stages": ["prepare", "encode", "pack"]}},
        "leave encode out",
    ),
    "float16": (
        {"train": {"precision": "fp16_mixed", "enable_mixed_precision": True}},
        "write encode_dtype: float32 or bfloat16",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_runs_whose_features_would_not_be_right_are_refused(tmp_path, name):
    over, why = REFUSED[name]
    base = {
        "model": {"model_path": "m", "config_path": "builtin:tiny-qwen3"},
        "data": {"encode_images": True},
    }
    sections = {part: {**base.get(part, {}), **over.get(part, {})} for part in {*base, *over}}
    said = penstock("check", write_run(tmp_path, **sections))
    assert said.code
    assert why in said.err
