"""Samples with videos: tokens and patches as transformers gives them, from every form of data."""

import json
from hashlib import sha256
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from penstock.core.errors import CapabilityError
from penstock.media.frame_list import join_frames
from penstock.media.video_processor import GRID, PIXELS
from penstock.prepare.workers import MEDIA_COUNTS
from penstock.rows.image_files import MEDIA, ImageFiles
from tests.media.pictures import encoded, picture
from tests.media.tiny_processors import write_processor
from tests.media.videos import SAMPLE, SMALL, Case, sample, video_file, write_video_processor
from tests.stages.prepare.media.test_image_archives import archive
from tests.stages.prepared import prepare, run, table_of, write_lines

CHAT = {"type": "chat"}
GOLDEN = json.loads((Path(__file__).parents[3] / "golden/videos.json").read_text())["samples"]
FILES = {f"{n}.mp4": video_file(Case("", 6 + n, 48, 64, 10).pixels) for n in range(2)}
ANSWER = {"role": "assistant", "content": "A cat."}


def write_data(folder, records, name="data.jsonl"):
    """Records beside two videos, an image and the frames of another video."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in FILES.items():
        (folder / file).write_bytes(content)
    (folder / "a.png").write_bytes(picture(0))
    for at, frame in enumerate(SAMPLE["qwen3_vl"].pixels):
        (folder / f"frame{at}.png").write_bytes(encoded(Image.fromarray(frame)))
    return write_lines(folder / name, records)


FRAMES = [f"frame{at}.png" for at in range(6)]


def watching(*parts, text="What is it?"):
    content = [*parts, {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": content}, ANSWER]}


@pytest.mark.parametrize("family", SAMPLE)
def test_tokens_and_patches_are_bitwise_those_of_the_processor(tmp_path, family):
    model = write_video_processor(tmp_path / "model", family, **SAMPLE[family].settings)
    data = write_data(tmp_path / "data", [{"messages": sample(FRAMES, "a.png")}])
    before = MEDIA_COUNTS.processed
    artifact, facts = run(prepare((data, CHAT), tokenizer=str(model)), tmp_path / "out")
    assert (facts["dropped"], facts["images"], MEDIA_COUNTS.processed - before) == ({}, 2, 2)
    [row], wanted = table_of(artifact.path).to_pylist(), GOLDEN[family]
    assert row["input_ids"] == wanted["ids"]
    files = ImageFiles.in_folder(artifact.path / MEDIA)
    assert files.kinds() == {"image", "video"}
    video, _ = files.inputs(row["images"])
    assert video[GRID].numpy().tolist() == wanted["grid"]
    assert sha256(video[PIXELS].numpy().tobytes()).hexdigest() == wanted["pixels"]
    assert row["image_tokens"][0] == np.prod(wanted["grid"]) // 4


def test_every_form_of_data_gives_the_same_sample(tmp_path):
    model = write_video_processor(tmp_path / "model", "qwen2_5_vl", **SMALL)
    plain = [{"role": "user", "content": "<video>What?"}, ANSWER]
    records = [
        watching({"type": "video", "path": "1.mp4"}, text="What?"),
        watching({"type": "video", "video": "1.mp4"}, text="What?"),
        watching({"type": "video_url", "video_url": {"url": "1.mp4"}}, text="What?"),
        {**watching({"type": "video"}, text="What?"), "videos": ["1.mp4"]},
        {"messages": plain, "videos": ["1.mp4"]},
        {"messages": plain, "video": {"path": "1.mp4"}},
    ]
    data = write_data(tmp_path / "data", records)
    feature = {"bytes": FILES["1.mp4"], "path": "somewhere.mp4"}
    rows = pa.table({"messages": [plain], "video": [feature]})
    pq.write_table(rows, tmp_path / "data" / "feature.parquet")
    stage = prepare(
        (data, CHAT), (tmp_path / "data" / "feature.parquet", CHAT), tokenizer=str(model)
    )
    artifact, facts = run(stage, tmp_path / "out")
    assert (facts["dropped"], facts["rows"]["train"]) == ({}, 7)
    rows = table_of(artifact.path).to_pylist()
    assert len({tuple(row["input_ids"]) for row in rows}) == 1
    assert {len(row["images"]) for row in rows} == {1}
    assert len({tuple(row["images"]) for row in rows}) == 1


def test_lists_of_frames_are_videos_in_parts_and_columns(tmp_path):
    model = write_video_processor(tmp_path / "model", "qwen3_vl", **SAMPLE["qwen3_vl"].settings)
    plain = [{"role": "user", "content": "<video>What?"}, ANSWER]
    records = [
        watching({"type": "video", "video": FRAMES, "fps": 4.0}, text="What?"),
        {"messages": plain, "videos": [{"video": FRAMES, "fps": 4.0}]},
        {"messages": plain, "videos": [FRAMES]},
    ]
    data = write_data(tmp_path / "data", records)
    artifact, facts = run(prepare((data, CHAT), tokenizer=str(model)), tmp_path / "out")
    assert facts["dropped"] == {}
    first, second, unknown = table_of(artifact.path).to_pylist()
    assert first["input_ids"] == second["input_ids"]
    assert first["images"] == second["images"] != unknown["images"]
    # Without fps the times in the text are those of 24 frames per second.
    assert first["input_ids"] != unknown["input_ids"]


def test_another_frame_is_another_video_and_the_same_ones_are_processed_once(tmp_path):
    model = write_video_processor(tmp_path / "model", "qwen3_vl", **SAMPLE["qwen3_vl"].settings)
    said = {"messages": sample(FRAMES, "a.png")}
    counts: list[int] = []
    for records, frame in (([said], None), ([said, said], None), ([said], picture(5, 90, 60))):
        data = write_data(tmp_path / "data", records)
        if frame:
            (tmp_path / "data" / FRAMES[3]).write_bytes(frame)
        stage = prepare((data, CHAT), tokenizer=str(model), slices=tmp_path / "slices")
        before = MEDIA_COUNTS.processed
        run(stage, tmp_path / f"out{len(counts)}")
        counts.append(MEDIA_COUNTS.processed - before)
    assert counts == [2, 0, 1]


BAD = {
    "missing": (watching({"type": "video", "path": "9.mp4"}), "video 9.mp4: there is no"),
    "damaged": (watching({"type": "video", "path": "bad.mp4"}), "bad.mp4: it is not a video"),
    "image": (watching({"type": "video", "path": "a.png"}), "a.png: it is an image, not a video"),
    "frame": (
        watching({"type": "video", "video": ["frame0.png", "9.png"]}),
        "frame 2: there is no",
    ),
    "uneven": (
        watching({"type": "video", "video": ["frame0.png", "a.png"]}),
        "frame 2 has 60 x 40 pixels, and the first 90 x 60",
    ),
    "no frames": (watching({"type": "video", "video": []}), "has no frames"),
    "fps": (
        watching({"type": "video", "video": "0.mp4", "fps": 2.0}),
        "has fps, which is that of a list of frames",
    ),
    "fps of 0": (
        watching({"type": "video", "video": FRAMES, "fps": 0}),
        "where a positive number is meant",
    ),
    "cut": (
        watching({"type": "video", "video": "0.mp4", "video_start": 1.0}),
        "has video_start, which is not read",
    ),
    "token": (watching({"type": "image", "path": "a.png"}, text="<|video_pad|>"), "for a video"),
    "places": (
        {"messages": [{"role": "user", "content": "<video>"}, ANSWER], "videos": ["0.mp4"] * 2},
        "it has 2 videos (videos or video) and 1 <video>",
    ),
}


def test_bad_videos_are_bad_rows_with_their_reasons(tmp_path):
    model = write_video_processor(tmp_path / "model", "qwen2_5_vl", **SMALL)
    good = watching({"type": "video", "path": "0.mp4"})
    data = write_data(tmp_path / "data", [good, *(bad for bad, _ in BAD.values())])
    (tmp_path / "data" / "bad.mp4").write_bytes(b"hello")
    stage = prepare((data, CHAT), tokenizer=str(model), bad_rows_allowed=1.0)
    _, facts = run(stage, tmp_path / "out")
    assert facts["rows"]["train"] == 1
    said = [example["why"] for example in facts["dropped_samples"]]
    assert len(said) == len(BAD)
    assert all(why in each for (_, why), each in zip(BAD.values(), said, strict=True)), said


def test_models_that_take_no_videos_refuse_them(tmp_path):
    data = write_data(tmp_path / "data", [watching({"type": "video", "path": "0.mp4"}), PLAIN])
    gemma = write_processor("gemma3", tmp_path / "gemma")
    stage = prepare((data, CHAT), tokenizer=str(gemma), bad_rows_allowed=1.0)
    _, facts = run(stage, tmp_path / "out")
    assert facts["rows"]["train"] == 1
    assert "the model has no video processor" in facts["dropped_samples"][0]["why"]
    other = write_processor("glm4v", tmp_path / "glm4v")
    with pytest.raises(CapabilityError, match="video processor Glm4vVideoProcessor is not support"):
        run(prepare((data, CHAT), tokenizer=str(other)), tmp_path / "other")


def test_videos_and_frames_are_read_from_tar_files(tmp_path):
    model = write_video_processor(tmp_path / "model", "qwen3_vl", **SAMPLE["qwen3_vl"].settings)
    write_data(tmp_path / "data", [])
    plain = {"messages": [{"role": "user", "content": "<video>What?"}, ANSWER]}
    frames = [f"b.{name}" for name in FRAMES]
    members = {
        "a.json": plain,
        "a.mp4": FILES["0.mp4"],
        "b.json": {**plain, "videos": [frames]},
        **{name: (tmp_path / "data" / name[2:]).read_bytes() for name in frames},
    }
    shard = archive(tmp_path / "shard.tar", members)
    artifact, facts = run(prepare((shard, CHAT), tokenizer=str(model)), tmp_path / "out")
    assert (facts["dropped"], facts["images"]) == ({}, 2)
    rows = table_of(artifact.path).to_pylist()
    assert [len(row["images"]) for row in rows] == [1, 1]
    content = join_frames([members[name] for name in frames], None)
    assert [row["images"][0] for row in rows] == [
        sha256(FILES["0.mp4"]).digest(),
        sha256(content).digest(),
    ]


PLAIN = {"messages": [{"role": "user", "content": "What?"}, ANSWER]}
