"""Images and audio that a run cannot take are refused before any work, with the data set."""

from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import penstock, small_run
from tests.media.pictures import picture
from tests.media.sounds import tone, wav, write_audio_processor
from tests.media.test_processor import change
from tests.media.tiny_processors import write_processor
from tests.stages.prepare.media.test_audio import hearing
from tests.stages.prepare.media.test_images import asking
from tests.stages.prepared import write_lines


def unsupported(folder: Path) -> None:
    """Another processor in a model's folder."""
    change(folder / "preprocessor_config.json", image_processor_type="PixtralImageProcessor")
    change(folder / "processor_config.json", processor_class="PixtralProcessor")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a text model": ({}, ""),
    "no processor": (
        {"model": {"tokenizer_path": "builtin:bytes"}},
        "builtin:bytes has no image processor",
    ),
    "cut samples": (
        {"data": {"sample_packing_method": "wrapped"}},
        "data.sample_packing_method is wrapped",
    ),
    "another processor": ({}, "PixtralProcessor has no image token"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_images_that_cannot_be_trained_on_are_refused_before_any_work(
    tmp_path: Path, name: str
) -> None:
    settings, why = REFUSED[name]
    model = write_processor("qwen3_vl", tmp_path / "model")
    if name == "another processor":
        unsupported(model)
    (tmp_path / "0.png").write_bytes(picture(0))
    text = write_lines(tmp_path / "text.jsonl", [{"messages": asking()}])
    images = write_lines(tmp_path / "images.jsonl", [{"messages": asking("0.png")}])
    sources = [{"path": str(text)}, {"path": str(images)}]
    config = small_run(
        tmp_path,
        model={"tokenizer_path": str(model), **settings.get("model", {})},
        data={"datasets": sources, **settings.get("data", {})},
    )
    planned = penstock("plan", config)
    assert planned.code in (2, 3)
    assert f"data.datasets.1 has images. {why}" in planned.err
    assert not list(tmp_path.glob("**/slices"))
    if name == "a text model":
        assert "data.datasets.1 has images" in penstock("check", config).err


AUDIO_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a native model": ({}, "Models of type qwen3 are trained on text, or text and images."),
    "no processor": ({"tokenizer_path": "builtin:bytes"}, "builtin:bytes has no audio processor"),
    "no packages": ({}, "Files that end in .flac need further packages."),
}


@pytest.mark.parametrize("name", AUDIO_REFUSED)
def test_audio_that_cannot_be_trained_on_is_refused_before_any_work(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, why = AUDIO_REFUSED[name]
    model = write_audio_processor(tmp_path / "model")
    file = "0.flac" if name == "no packages" else "0.wav"
    (tmp_path / file).write_bytes(wav(tone(0)))
    monkeypatch.setattr("penstock.media.kinds.has_extra", lambda _: False)
    text = write_lines(tmp_path / "text.jsonl", [{"messages": hearing()}])
    sounds = write_lines(tmp_path / "sounds.jsonl", [{"messages": hearing(file)}])
    config = small_run(
        tmp_path,
        model={"tokenizer_path": str(model), **settings},
        data={"datasets": [{"path": str(text)}, {"path": str(sounds)}]},
    )
    planned = penstock("plan", config)
    assert planned.code in (2, 3)
    assert f"data.datasets.1 has audio. {why}" in planned.err
    assert not list(tmp_path.glob("**/slices"))


def test_check_reads_the_first_images_and_says_what_is_wrong(tmp_path: Path) -> None:
    model = write_processor("qwen3_vl", tmp_path / "model")
    (tmp_path / "0.png").write_bytes(picture(0))
    data = write_lines(tmp_path / "images.jsonl", [{"messages": asking("0.png", "1.png")}])
    config = small_run(
        tmp_path,
        model={"tokenizer_path": str(model)},
        data={"datasets": [{"path": str(data)}]},
        pipeline={"stages": ["prepare", "pack"]},
    )
    said = penstock("check", config)
    assert said.code == 2
    assert "image 1.png: there is no" in said.err
    (tmp_path / "1.png").write_bytes(picture(1))
    said = penstock("check", config)
    assert said.code == 0
    assert "the first 1 samples have" in said.err


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("gemma3", "has no video processor"),
        ("glm4v", "Glm4vVideoProcessor is not supported"),
        ("qwen3_vl", "Files that end in .mp4 need further packages."),
    ],
)
def test_videos_that_cannot_be_trained_on_are_refused_before_any_work(
    tmp_path: Path, family: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.media.kinds.has_extra", lambda _: family != "qwen3_vl")
    model = write_processor(family, tmp_path / "model")
    message = {"role": "user", "content": [{"type": "video", "path": "0.mp4"}]}
    record = {"messages": [message, {"role": "assistant", "content": "A cat."}]}
    data = write_lines(tmp_path / "videos.jsonl", [record])
    config = small_run(
        tmp_path, model={"tokenizer_path": str(model)}, data={"datasets": [{"path": str(data)}]}
    )
    planned = penstock("plan", config)
    assert planned.code in (2, 3)
    assert "data.datasets.0 has videos. " in planned.err
    assert why in planned.err
    assert not list(tmp_path.glob("**/slices"))
