"""A run's images from its config to what `penstock data show` prints."""

import base64
import re
from io import BytesIO

import numpy as np
from PIL import Image

from penstock.cli.console import Console
from penstock.cli.data.commands import SampleSelection
from penstock.cli.data.load_prepared import Prepared
from penstock.cli.data.show import show_samples
from penstock.config.loading.load import loads
from penstock.core.cache.store import get_or_build
from penstock.media.reference import image_digest
from penstock.pipeline.plan import plan
from penstock.rows.reader import PackedRows
from tests.media.pictures import picture
from tests.media.sounds import write_audio_processor
from tests.media.tiny_processors import write_processor
from tests.media.videos import SAMPLE, write_video_processor
from tests.stages.prepare.media.test_audio import SOUNDS, hearing
from tests.stages.prepare.media.test_audio import write_data as write_audio
from tests.stages.prepare.media.test_images import asking
from tests.stages.prepare.media.test_videos import watching
from tests.stages.prepare.media.test_videos import write_data as write_videos
from tests.stages.prepared import write_lines

URI = re.compile(r'src="data:image/jpeg;base64,([^"]+)"')


def test_a_sample_is_shown_with_its_images_and_packed_with_their_tensors(tmp_path, capsys):
    images = {"a.png": picture(1, 60, 40), "b.png": picture(2, 31, 90)}
    (tmp_path / "images").mkdir()
    for name, content in images.items():
        (tmp_path / "images" / name).write_bytes(content)
    data = write_lines(tmp_path / "text" / "data.jsonl", [{"messages": asking(*images)}])
    run = {
        "model": {
            "config_path": "builtin:tiny-qwen3",
            "tokenizer_path": str(write_processor("qwen3_vl", tmp_path / "model")),
        },
        "data": {
            "datasets": [{"path": str(data), "image_folder": str(tmp_path / "images")}],
            "dataset_prepared_path": str(tmp_path / "root"),
            "sample_packing_sequence_len": 512,
        },
        "train": {"output_dir": "out", "data_parallel_mode": "none"},
    }
    planned = plan(loads(run), ("pack",))
    for step in planned.steps:
        get_or_build(step)
    wanted = SampleSelection(index=[0])
    [shown] = show_samples(Prepared(planned.run, planned.steps[0]), wanted, Console())["samples"]
    assert [(each["digest"], each["width"], each["height"]) for each in shown["images"]] == [
        (image_digest(content).hex(), *size)
        for content, size in zip(images.values(), [(60, 40), (31, 90)], strict=True)
    ]
    printed = capsys.readouterr().out
    for number, image in enumerate(shown["images"]):
        assert f"image {number}: {image['digest'][:16]}, " in printed
        assert f"{image['tokens']} tokens" in printed
    assert re.search(r"<\|image_pad\|> x \d", printed) or "<|image_pad|><|image_pad|>" in printed
    page = tmp_path / "page.html"
    show_samples(Prepared(planned.run, planned.steps[0]), wanted, Console(), page)
    said = page.read_text()
    found = [Image.open(BytesIO(base64.b64decode(uri))) for uri in URI.findall(said)]
    for image, content in zip(found, images.values(), strict=True):
        difference = np.asarray(image, int) - np.asarray(Image.open(BytesIO(content)), int)
        assert np.abs(difference).mean() < 8  # JPEG
    assert "<i>&lt;|im_start|&gt;</i>user" in said
    assert not re.search("<script|https?://|<[|]", said)
    (tmp_path / "images" / "a.png").unlink()
    show_samples(Prepared(planned.run, planned.steps[0]), wanted, Console(), page)
    assert page.read_text().count("The images are no longer what they were.") == 1
    assert not URI.findall(page.read_text())
    row = PackedRows(planned.steps[1].path / "data" / "train").row(0)
    assert [image.num_tokens for image in row.images] == [i["tokens"] for i in shown["images"]]


def test_a_sample_is_shown_with_the_seconds_of_its_audio_and_packed_with_its_features(
    tmp_path, capsys
):
    data = write_audio(tmp_path / "data", [{"messages": hearing("1.wav")}])
    run = {
        "model": {
            "config_path": "builtin:tiny-qwen3",
            "tokenizer_path": str(write_audio_processor(tmp_path / "model")),
        },
        "data": {
            "datasets": [{"path": str(data)}],
            "dataset_prepared_path": str(tmp_path / "root"),
            "sample_packing_sequence_len": 512,
        },
        "train": {"output_dir": "out", "data_parallel_mode": "none"},
    }
    planned = plan(loads(run), ("pack",))
    for step in planned.steps:
        get_or_build(step)
    prepared = Prepared(planned.run, planned.steps[0])
    show_samples(prepared, SampleSelection(index=[0]), Console())
    digest = image_digest(SOUNDS["1.wav"]).hex()[:16]
    assert f"audio 0: {digest}, 0.31 s at 16000 Hz, 8 tokens" in capsys.readouterr().out
    row = PackedRows(planned.steps[1].path / "data" / "train").row(0)
    [audio] = row.images
    assert audio.tensors.keys() == {"input_features", "feature_attention_mask"}
    assert audio.num_tokens == 8


def test_a_sample_is_shown_with_the_frames_of_its_video(tmp_path, capsys):
    model = write_video_processor(tmp_path / "model", "qwen3_vl", **SAMPLE["qwen3_vl"].settings)
    record = watching({"type": "video", "path": "0.mp4"})
    run = {
        "model": {"config_path": "builtin:tiny-qwen3", "tokenizer_path": str(model)},
        "data": {
            "datasets": [{"path": str(write_videos(tmp_path / "data", [record]))}],
            "dataset_prepared_path": str(tmp_path / "root"),
            "sample_packing_sequence_len": 512,
        },
        "train": {"output_dir": "out", "data_parallel_mode": "none"},
    }
    planned = plan(loads(run), ("prepare",))
    for step in planned.steps:
        get_or_build(step)
    wanted = SampleSelection(index=[0])
    prepared = Prepared(planned.run, planned.steps[0])
    [shown] = show_samples(prepared, wanted, Console())["samples"]
    [video] = shown["images"]
    assert (video["kind"], video["frames"], video["width"], video["height"]) == ("video", 4, 64, 48)
    assert ", 4 frames of 64 x 48 pixels, " in capsys.readouterr().out
    page = tmp_path / "page.html"
    show_samples(prepared, wanted, Console(), page)
    [uri] = URI.findall(page.read_text())
    assert Image.open(BytesIO(base64.b64decode(uri))).size == (64, 48)
