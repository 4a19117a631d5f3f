"""What is decoded of videos, and patches and text as the model's processor gives them."""

import json
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from transformers.video_utils import read_video_pyav

from penstock.core.errors import CapabilityError, ConfigError
from penstock.media import video
from penstock.media.frame_list import join_frames
from penstock.media.kinds import MissingPackages
from penstock.media.video import BadVideo, VideoHeader, open_video
from penstock.media.video_processor import GRID, INDICES, PIXELS, SECONDS
from tests.media.pictures import picture
from tests.media.videos import (
    CASES,
    VIDEO,
    ArrayVideo,
    Case,
    load_processor,
    video_file,
    write_video_processor,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/videos.json").read_text())["cases"]
FRAMES = Case("qwen3_vl", 12, 48, 64, 10).pixels
FILE = video_file(FRAMES)


def digest(array: np.ndarray) -> str:
    return sha256(array.tobytes()).hexdigest()


@pytest.mark.parametrize("name", CASES)
def test_patches_and_text_are_bitwise_those_of_the_processor(tmp_path, name):
    case, wanted = CASES[name], GOLDEN[name]
    mine = load_processor(write_video_processor(tmp_path, case.family, **case.settings))
    found = mine.process(ArrayVideo(case.pixels, case.fps))
    assert found[INDICES].numpy().tolist() == wanted["frames"]
    assert found[GRID].numpy().tolist() == wanted["grid"]
    pixels = found[PIXELS].numpy()
    assert pixels[0, :4].tolist() == wanted["first"]
    assert digest(pixels) == wanted["pixels"]
    if wanted["seconds"] is not None:
        assert float(found[SECONDS].numpy()[0]) == wanted["seconds"]
    text = f"A {VIDEO} B".replace(mine.token, mine.replacement(found))
    assert mine.processor.tokenizer(text)["input_ids"] == wanted["ids"]


@pytest.mark.parametrize(
    ("kind", "codec", "options"),
    [
        ("mp4", "mpeg4", {}),
        ("mp4", "mpeg4", {"movflags": "frag_keyframe+empty_moov"}),
        ("mov", "mpeg4", {}),
        ("avi", "mpeg4", {}),
        ("webm", "libvpx", {}),
        ("matroska", "ffv1", {}),
    ],
    ids=["mp4", "fragments", "mov", "avi", "webm", "mkv"],
)
def test_frames_of_every_container_are_those_that_transformers_reads(
    tmp_path, kind, codec, options
):
    content = video_file(FRAMES, kind=kind, codec=codec, **options)
    found = open_video(content)
    assert found.header == VideoHeader(12, 10.0, 64, 48)
    (tmp_path / "video").write_bytes(content)
    chosen = np.array([0, 3, 4, 11])
    theirs, _ = read_video_pyav(tmp_path / "video", lambda **_: chosen)
    assert np.stack([*found.read(chosen.tolist())]).tobytes() == theirs.tobytes()
    twice = [*found.read([2, 2])]
    assert twice[0].tobytes() == twice[1].tobytes()


def test_frames_of_a_list_are_used_as_they_are():
    pictures = [picture(seed, 40, 30) for seed in range(3)]
    found = open_video(join_frames(pictures, 4.0))
    assert found.header == VideoHeader(3, 4.0, 40, 30, is_sampled=True)
    assert len([*found.read([0, 1, 2])]) == 3
    uneven = open_video(join_frames([*pictures, picture(9, 30, 30)], None))
    with pytest.raises(BadVideo, match="frame 4 has 30 x 30 pixels, and the first 40 x 30"):
        list(uneven.read([0, 3]))


BAD = {
    "empty": (b"", "it is empty"),
    "text": (b"hello, world", "it is not a video that can be decoded"),
    "image": (picture(0), "it is an image, not a video"),
    "gif": (picture(0, kind="GIF"), "give its frames as a list"),
    "header": (FILE[:200], "it is damaged"),
    "no frames": (join_frames([], None), "it has no frames"),
    "bad frame": (join_frames([picture(0), b"x"], None), "one of its frames cannot be used"),
    "joined": (join_frames([picture(0)], None)[:20], "a damaged list of frames"),
}


@pytest.mark.parametrize(("content", "why"), BAD.values(), ids=BAD.keys())
def test_what_is_no_video_is_refused_with_its_reason(content, why):
    with pytest.raises(BadVideo, match=why):
        open_video(content)


def test_a_file_whose_frames_are_missing_is_damaged():
    short = video_file(FRAMES, kind="webm", codec="libvpx")
    found = video.FileVideo(short, "matroska", VideoHeader(20, 10.0, 64, 48))
    with pytest.raises(BadVideo, match="1 of the 2 frames that are used are missing"):
        list(found.read([0, 15]))


@pytest.mark.parametrize(
    ("limit", "value", "why"),
    [
        ("MAX_SECONDS", 1, r"it is 1 s long; 1 are allowed"),
        ("MAX_FRAME_PIXELS", 3_000, "its frames have 64 x 48 pixels; 3,000 together"),
        ("MAX_DECODED_PIXELS", 30_000, "its 12 frames have 36,864 pixels; 30,000 are allowed"),
    ],
)
def test_limits_are_checked_before_anything_is_decoded(monkeypatch, limit, value, why):
    monkeypatch.setattr(video, limit, value)
    monkeypatch.setattr(video, "_to_rgb", None)
    with pytest.raises(BadVideo, match=why):
        open_video(FILE)


def test_frames_that_are_used_have_a_limit_before_they_are_decoded(tmp_path, monkeypatch):
    mine = load_processor(write_video_processor(tmp_path, "qwen3_vl"))
    monkeypatch.setattr("penstock.media.video_processor.MAX_PIXELS", 10_000)
    monkeypatch.setattr(video, "_to_rgb", None)
    stored = mine.store(b"a" * 32, FILE)
    assert "10,000 are allowed: sample fewer frames" in str(stored.error)


def test_processors_that_are_not_supported_are_refused_by_name(tmp_path):
    folder = write_video_processor(tmp_path, "qwen3_vl", video_processor_type="GlmVideoProcessor")
    with pytest.raises(CapabilityError, match="video processor GlmVideoProcessor is not supported"):
        load_processor(folder)
    for settings, why in (
        ({"do_normalize": False}, "do_normalize"),
        ({"resample": 0}, "resample of the video processor is 0"),
        ({"size": {"height": 3}}, "size of the video processor"),
    ):
        with pytest.raises(CapabilityError, match=why):
            load_processor(write_video_processor(tmp_path, "qwen3_vl", **settings))
    with pytest.raises(ConfigError, match="exclude each other"):
        load_processor(write_video_processor(tmp_path, "qwen3_vl", fps=2.0, num_frames=4))


def test_without_pyav_a_file_says_what_to_install(monkeypatch):
    monkeypatch.setattr(video, "has_extra", lambda _: False)
    with pytest.raises(MissingPackages, match=r"pip install 'penstock\[video\]'"):
        open_video(FILE)
    assert open_video(join_frames([picture(0)], None)).header.frames == 1
