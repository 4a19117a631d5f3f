"""A run on videos, from records to an exported model, with and without features computed once."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from penstock.media.video_processor import GRID, INDICES, PIXELS, SECONDS
from penstock.models.vision.features import FEATURES
from penstock.rows.image_files import MEDIA, ImageFiles
from tests.cli.command import penstock
from tests.media.videos import SAMPLE, write_video_processor
from tests.pipeline.media.test_image_chain import write_model
from tests.pipeline.runs import write_run
from tests.stages.prepare.media.test_videos import FRAMES, PLAIN, watching, write_data
from tests.stages.prepared import table_of, write_lines

pytestmark = pytest.mark.usefixtures("warm_ranks")

VIDEOS = [
    [{"type": "video", "path": "0.mp4"}],
    [{"type": "image", "path": "a.png"}, {"type": "video", "path": "1.mp4"}],
    [{"type": "video", "video": FRAMES, "fps": 4.0}, {"type": "video", "path": "0.mp4"}],
]
RECORDS = [PLAIN, *(watching(*VIDEOS[n % 3], text=f"What is {n}?") for n in range(11))]


def write_video_model(folder, family):
    def write(family, folder):
        write_video_processor(folder, family, **SAMPLE[family].settings)

    return write_model(folder, family, write)


def loss_of(folder, prepared):
    """By transformers, of the prepared samples, each alone."""
    auto = transformers.AutoModelForImageTextToText
    model = auto.from_pretrained(folder, dtype=torch.float32)
    files, total = ImageFiles.in_folder(prepared / MEDIA), 0.0
    config = model.config
    for row in table_of(prepared).to_pylist():
        ids = torch.tensor([row["input_ids"]])
        types = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
        inputs = {"mm_token_type_ids": types}
        for digest in row["images"]:
            stored = files.get(digest)
            assert stored is not None
            names = {PIXELS: "pixel_values", GRID: "image_grid_thw"}
            if INDICES in stored.tensors:
                names = {PIXELS: "pixel_values_videos", GRID: "video_grid_thw", SECONDS: SECONDS}
            for mine, name in names.items():
                if name == SECONDS and config.model_type != "qwen2_5_vl":
                    continue
                value = torch.from_numpy(stored.tensors[mine].numpy().copy())
                inputs[name] = torch.cat([inputs[name], value]) if name in inputs else value
        labels = torch.tensor([row["labels"]])
        with torch.no_grad():
            total += model(input_ids=ids, labels=labels, **inputs).loss.item()
    return total


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_videos_are_prepared_packed_trained_on_and_exported(tmp_path, family):
    model = write_video_model(tmp_path / "model", family)
    data = write_data(tmp_path / "data", RECORDS)
    sections = {
        "model": {"model_path": str(model), "config_path": None, "foundation": {}, "freeze": []},
        "data": {
            "datasets": [{"path": str(data), "type": "chat"}],
            "sample_packing_sequence_len": 256,
        },
        "train": {"global_batch_size": 2, "num_train_epochs": 10, "lr": 0.002},
    }
    config = write_run(tmp_path, **sections)
    said = penstock("run", config, "--json")
    assert said.code == 0, said.err
    lines = [json.loads(x) for x in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    losses = [one["loss"] for one in lines if "loss" in one]
    assert losses[-1] < 0.8 * losses[0]
    [exported] = (tmp_path / "artifacts/export").glob("*/hf")
    prepared = Path(next(x["path"] for x in said.last["stages"] if x["stage"] == "prepare"))
    assert loss_of(exported, prepared) < 0.8 * loss_of(model, prepared)
    assert (exported / "video_preprocessor_config.json").is_file()
    assert penstock("plan", config, "--json").code == 0


@pytest.mark.dist
@pytest.mark.exhaustive
def test_a_run_on_features_of_videos_is_the_run_on_videos(tmp_path):
    model = write_video_model(tmp_path / "model", "qwen2_5_vl")
    data = write_data(tmp_path / "data", RECORDS)
    found = {}
    for encoded in (False, True):
        sections = {
            "model": {"model_path": str(model), "config_path": None, "foundation": {}},
            "data": {
                "datasets": [{"path": str(data), "type": "chat"}],
                "sample_packing_sequence_len": 256,
                "encode_images": encoded,
            },
            "train": {
                "global_batch_size": 2,
                "num_train_epochs": 1,
                "enable_mixed_precision": False,
            },
        }
        folder = tmp_path / str(encoded)
        said = penstock("run", write_run(folder, **sections), "--json")
        assert said.code == 0, said.err
        lines = [json.loads(x) for x in (folder / "out/metrics.jsonl").read_text().splitlines()]
        found[encoded] = [one["loss"] for one in lines if "loss" in one]
        packed = Path(next(x["path"] for x in said.last["stages"] if x["stage"] == "pack"))
        stored = ImageFiles.in_folder(packed / MEDIA)
        assert all((FEATURES in one) == encoded for one in stored.inputs(stored.digests()))
    assert found[True] == pytest.approx(found[False], rel=1e-6)


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_answers_about_videos_are_preferred_as_chosen(tmp_path, family):
    model = write_video_model(tmp_path / "model", family)
    write_data(tmp_path / "data", [])
    pairs = [
        {
            "conversations": [{"from": "human", "value": "<video>Which video?"}],
            "chosen": {"from": "gpt", "value": f"The video {n % 2}."},
            "rejected": {"from": "gpt", "value": f"Not a video {n % 3}."},
            "videos": [f"{n % 2}.mp4"],
        }
        for n in range(8)
    ]
    data = write_lines(tmp_path / "data" / "pairs.jsonl", pairs)
    sections = {
        "model": {"model_path": str(model), "config_path": None, "foundation": {}},
        "data": {
            "datasets": [{"path": str(data), "type": "preference"}],
            "sample_packing_sequence_len": 256,
        },
        "train": {
            **{"objective": "preference", "global_batch_size": 2, "num_train_epochs": 6},
            "enable_mixed_precision": False,
        },
    }
    said = penstock("run", write_run(tmp_path, **sections), "--json")
    assert said.code == 0, said.err
    records = [json.loads(x) for x in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    first, *_, last = [one["loss"] for one in records if "loss" in one]
    # Nothing has moved yet: the model is its own reference.
    assert first == pytest.approx(0.693147, rel=1e-5)
    assert last < 0.9 * first
