"""Sizes of images and frames of videos that a data set sets, in place of the processor's own."""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoImageProcessor

from penstock.core.errors import CapabilityError, ConfigError
from penstock.media.bounds import MediaBounds
from penstock.media.decode import decode
from penstock.media.load import load_processor
from penstock.media.reference import image_digest
from penstock.media.video_processor import INDICES, PIXELS
from penstock.rows.pixel_table import concatenate
from penstock.rows.tokenizer import load_tokenizer
from tests.media.pictures import picture
from tests.media.test_video import GOLDEN, digest
from tests.media.tiny_processors import write_processor
from tests.media.videos import CASES, ArrayVideo, Case, write_video_processor

PICTURES = [picture(1, 60, 40), picture(2, 31, 90, "JPEG"), picture(3, 400, 330, "JPEG")]


def load(kind: str, folder: Path, **bounds: Any) -> Any:
    tokenizer = load_tokenizer(str(folder))
    return load_processor(kind, str(folder), None, tokenizer, MediaBounds(**bounds))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "glm4v", "ernie4_5_vl_moe"])
def test_images_have_the_sizes_of_the_processor_called_with_these_bounds(tmp_path, family):
    write_processor(family, tmp_path)
    theirs = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    own = dict(theirs.size)
    usual, changed = load("image", tmp_path), list[bool]()
    for bounds in (
        {"image_max_pixels": 2 * 56**2},
        {"image_min_pixels": 84**2, "image_max_pixels": 3 * 112**2},
        {"image_min_pixels": own["longest_edge"] // 2},
    ):
        mine = load("image", tmp_path, **bounds)
        size = {
            "shortest_edge": bounds.get("image_min_pixels", own["shortest_edge"]),
            "longest_edge": bounds.get("image_max_pixels", own["longest_edge"]),
        }
        images = [Image.open(BytesIO(each)) for each in PICTURES]
        wanted = theirs(images, size=size, return_tensors="np")
        found = [mine.process(decode(each)) for each in PICTURES]
        for name, values in wanted.items():
            joined = concatenate([each[name] for each in found])
            assert (joined.shape, joined.tobytes()) == (values.shape, values.tobytes())
        grids = wanted["image_grid_thw"].prod(1).tolist()
        plain = [usual.process(decode(each))["image_grid_thw"].numpy().prod() for each in PICTURES]
        changed.append(grids != plain)
        assert mine.replacement(found[0]).count(mine.reserved[-1]) == grids[0] // 4
        assert mine.key != usual.key
        identity = image_digest(PICTURES[0])
        assert mine.stored_digest(identity, several=False) != identity
        assert usual.stored_digest(identity, several=False) == identity
    assert sum(changed) >= 2


@pytest.mark.parametrize("family", ["llava", "llava_next", "llava_onevision", "gemma3", "idefics3"])
def test_processors_of_other_sizes_refuse_bounds_of_pixels_by_name(tmp_path, family):
    write_processor(family, tmp_path)
    with pytest.raises(CapabilityError, match=r"image_max_pixels: the image processor .*Pil has"):
        load("image", tmp_path, image_max_pixels=10_000)


def test_bounds_between_which_there_is_no_size_are_refused(tmp_path):
    write_processor("qwen3_vl", tmp_path)
    with pytest.raises(ConfigError, match=r"image_max_pixels is 100, (.|\n)*Write image_min_pix"):
        load("image", tmp_path, image_max_pixels=100)
    with pytest.raises(ConfigError, match=r"image_min_pixels is 1,000,000"):
        load("image", tmp_path, image_min_pixels=10**6)


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("qwen2, by fps", {"video_fps": 2.0}),
        ("qwen2, at most", {"video_fps": 5.0, "video_max_frames": 9}),
        ("qwen3, by fps", {"video_fps": 2.0}),
    ],
)
def test_frames_are_those_of_the_processor_with_these_bounds_in_its_file(tmp_path, name, bounds):
    case = CASES[name]
    others = {"fps": 7.0} if case.family == "qwen3_vl" else {}
    write_video_processor(tmp_path, case.family, size=case.settings["size"], **others)
    mine = load("video", tmp_path, **bounds)
    found = mine.process(ArrayVideo(case.pixels, case.fps))
    assert found[INDICES].numpy().tolist() == GOLDEN[name]["frames"]
    assert digest(found[PIXELS].numpy()) == GOLDEN[name]["pixels"]
    assert mine.key != load("video", tmp_path).key


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize(
    ("bounds", "count"),
    [({"video_min_frames": 8}, 8), ({"video_max_frames": 2, "video_min_frames": 1}, 2), ({}, 4)],
)
def test_a_video_has_no_fewer_and_no_more_frames(tmp_path, family, bounds, count):
    write_video_processor(tmp_path, family, size=CASES["qwen3, by fps"].settings["size"])
    video = ArrayVideo(Case(family, 40, 64, 64, 10.0).pixels, 10.0)  # 4 s
    frames = load("video", tmp_path, video_fps=1.0, **bounds).process(video)[INDICES].numpy()
    assert len(frames) == count
    assert len(set(np.diff(frames))) <= 2
    if family == "qwen2_5_vl" and bounds:
        with pytest.raises(ConfigError, match=r"does not sample frames (.|\n)*Write video_fps too"):
            load("video", tmp_path, **bounds)


def test_bounds_without_a_number_of_frames_between_are_refused(tmp_path):
    write_video_processor(tmp_path, "qwen3_vl")
    with pytest.raises(ConfigError, match="video_max_frames: videos have from 4 to 2 frames"):
        load("video", tmp_path, video_max_frames=2)
