"""Samples with audio: tokens and features as transformers gives them, from every form of data."""

import base64
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
from transformers import AutoProcessor

from penstock.core.errors import StageError
from penstock.media import audio
from penstock.media.audio import decode_audio
from penstock.prepare import slice_cache
from penstock.prepare.workers import MEDIA_COUNTS
from penstock.rows.image_files import MEDIA, ImageFiles
from penstock.rows.pixel_table import concatenate
from tests.media.pictures import picture
from tests.media.sounds import RATE, tone, wav, write_audio_processor
from tests.media.tiny_processors import write_processor
from tests.stages.prepared import prepare, run, table_of, write_lines

CHAT = {"type": "chat"}
SOUNDS = {f"{n}.wav": wav(tone(n, 4_000 + 900 * n)) for n in range(4)}


def hearing(*names, text="What is it?", answer="A bell."):
    parts = [{"type": "audio", "path": name} for name in names]
    return [
        {"role": "user", "content": [*parts, {"type": "text", "text": text}]},
        {"role": "assistant", "content": answer},
    ]


def write_data(folder, records, name="data.jsonl"):
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in SOUNDS.items():
        (folder / file).write_bytes(content)
    return write_lines(folder / name, records)


def test_tokens_and_features_are_bitwise_those_of_the_processor(tmp_path):
    model = write_audio_processor(tmp_path / "model")
    conversations = [hearing("0.wav"), hearing("3.wav", "1.wav", "3.wav"), hearing()]
    data = write_data(tmp_path / "data", [{"messages": each} for each in conversations])
    before = MEDIA_COUNTS.processed
    artifact, facts = run(prepare((data, CHAT), tokenizer=str(model)), tmp_path / "out")
    assert (facts["dropped"], facts["images"], MEDIA_COUNTS.processed - before) == ({}, 4, 3)
    table, files = table_of(artifact.path), ImageFiles.in_folder(artifact.path / MEDIA)
    theirs = AutoProcessor.from_pretrained(model)
    token = theirs.audio_token_id
    for row, conversation in zip(table.to_pylist(), conversations, strict=True):
        names = [p["path"] for p in conversation[0]["content"] if p["type"] == "audio"]
        audio = [decode_audio(SOUNDS[name], RATE) for name in names]
        options = {"return_tensors": "np"} | ({"sampling_rate": RATE} if audio else {})
        text = theirs.apply_chat_template(conversation)
        wanted = theirs(text=text, audio=audio or None, **options)
        assert row["input_ids"] == wanted["input_ids"][0].tolist()
        found = files.inputs(row["images"])
        for name in found[0] if found else ():
            joined = concatenate([each[name] for each in found])
            assert joined.tobytes() == wanted[name].tobytes()
        assert sum(row["image_tokens"]) == row["input_ids"].count(token)
        assert token not in row["labels"]
        assert any(label != -100 for label in row["labels"])


def test_every_form_of_data_gives_the_same_sample(tmp_path):
    model = write_audio_processor(tmp_path / "model")
    content = SOUNDS["1.wav"]
    encoded = base64.b64encode(content).decode()
    text, answer = {"type": "text", "text": "What?"}, {"role": "assistant", "content": "A bell."}

    def chat(part):
        return {"messages": [{"role": "user", "content": [part, text]}, answer]}

    plain = [{"role": "user", "content": "<audio>What?"}, answer]
    records = [
        chat({"type": "audio", "path": "1.wav"}),
        chat({"type": "audio", "audio": "1.wav"}),
        chat({"type": "audio", "url": f"data:audio/wav;base64,{encoded}"}),
        chat({"type": "audio_url", "audio_url": {"url": "1.wav"}}),
        chat({"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}}),
        {**chat({"type": "audio"}), "audios": ["1.wav"]},
        {"messages": plain, "audios": ["1.wav"]},
        {"messages": plain, "audio": {"path": "1.wav"}},
    ]
    data = write_data(tmp_path / "data", records)
    feature = {"bytes": content, "path": "somewhere.wav"}
    rows = pa.table({"messages": [plain], "audio": [feature]})
    pq.write_table(rows, tmp_path / "data" / "feature.parquet")
    stage = prepare(
        (data, CHAT), (tmp_path / "data" / "feature.parquet", CHAT), tokenizer=str(model)
    )
    artifact, facts = run(stage, tmp_path / "out")
    assert (facts["dropped"], facts["rows"]["train"]) == ({}, 9)
    rows = table_of(artifact.path).to_pylist()
    assert len({tuple(row["input_ids"]) for row in rows}) == 1
    assert len({tuple(row["images"]) for row in rows}) == 1
    assert all(len(row["images"]) == 1 for row in rows)


BAD = {
    "missing": (hearing("9.wav"), "audio 9.wav: there is no"),
    "damaged": (hearing("bad.wav"), "bad.wav: it is not audio that can be decoded"),
    "answer": (
        [hearing()[0], {"role": "assistant", "content": [{"type": "audio", "path": "0.wav"}]}],
        "is audio, which no answer can hold",
    ),
    "token": (hearing(text="<|AUDIO|>"), "stands for audio"),
    "video": (
        [{"role": "user", "content": [{"type": "video", "path": "a.mp4"}]}, hearing()[1]],
        "it has videos, and the model has no video processor",
    ),
    "image": (
        [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}, hearing()[1]],
        "it has images, and the model has no image processor",
    ),
}


def test_bad_audio_is_a_bad_row_with_its_reason(tmp_path):
    model = write_audio_processor(tmp_path / "model")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "bad.wav").write_bytes(b"hello")
    records = [{"messages": hearing("0.wav")}, *({"messages": bad} for bad, _ in BAD.values())]
    unplaced = {"messages": hearing(), "audios": ["0.wav", "1.wav"]}
    data = write_data(tmp_path / "data", [*records, unplaced])
    stage = prepare((data, CHAT), tokenizer=str(model), bad_rows_allowed=1.0)
    _, facts = run(stage, tmp_path / "out")
    assert facts["rows"]["train"] == 1
    said = [example["why"] for example in facts["dropped_samples"]]
    wanted = [*(why for _, why in BAD.values()), "it has 2 audio and no <audio> in its text"]
    assert len(said) == len(wanted)
    assert all(why in each for why, each in zip(wanted, said, strict=True))


def test_other_formats_give_samples_and_what_lacks_packages_is_read_once_they_are_there(
    tmp_path, monkeypatch
):
    model = write_audio_processor(tmp_path / "model")
    folder = tmp_path / "data"
    data = write_data(folder, [{"messages": hearing(n)} for n in ("0.flac", "1.wav", "2.wav")])
    soundfile.write(folder / "0.flac", tone(5, 6_000), RATE)
    soundfile.write(folder / "2.wav", tone(6, 6_000), 2 * RATE)
    stage = prepare((data, CHAT), tokenizer=str(model), bad_rows_allowed=0.9)
    out, slices = tmp_path / "out", tmp_path / "slices"

    def counts(name):
        _, facts = run(replace(stage, slices_path=slices), out / name)
        return facts["rows"]["train"], facts["dropped"]

    monkeypatch.setattr(audio, "has_extra", lambda _: False)
    monkeypatch.setattr(slice_cache, "has_extra", lambda _: False)
    for name in ("without", "still"):
        with pytest.raises(StageError, match=r"are not installed(.*\n)*.*audio\]'\.$") as told:
            counts(name)
        assert "data.jsonl:1: audio 0.flac: it is FLAC, which needs further" in str(told.value)
        assert "data.jsonl:3: audio 2.wav: its sampling rate is 32000 Hz" in str(told.value)
        before = MEDIA_COUNTS.processed
    monkeypatch.undo()
    assert counts("with") == (3, {})
    assert MEDIA_COUNTS.processed == before + 2


def test_audio_is_refused_by_a_model_of_images_and_a_text_model(tmp_path):
    records = [{"messages": hearing("0.wav")}, {"messages": hearing()}]
    data = write_data(tmp_path / "data", records)
    (tmp_path / "data" / "a.png").write_bytes(picture(0))
    for name, tokenizer in (
        ("images", str(write_processor("qwen3_vl", tmp_path / "images"))),
        ("text", str(write_processor("qwen3_vl", tmp_path / "text"))),
    ):
        if name == "text":
            for file in ("preprocessor_config.json", "processor_config.json"):
                (tmp_path / "text" / file).unlink()
        stage = prepare((data, CHAT), tokenizer=tokenizer, bad_rows_allowed=1.0)
        _, facts = run(stage, tmp_path / f"{name}.out")
        assert facts["rows"]["train"] == 1
        [example] = facts["dropped_samples"]
        assert "it has audio, and the model has no audio processor" in example["why"]


def test_a_text_with_an_unread_audio_column_is_text(tmp_path):
    record = {"messages": hearing(), "audio": {"bytes": SOUNDS["0.wav"], "path": None}}
    model = write_processor("qwen3_vl", tmp_path / "model")
    rows = pa.Table.from_pylist([{**record, "messages": TEXT}])
    (tmp_path / "data").mkdir()
    pq.write_table(rows, tmp_path / "data" / "d.parquet")
    stage = prepare((tmp_path / "data" / "d.parquet", CHAT), tokenizer=str(model))
    _, facts = run(stage, tmp_path / "out")
    assert (facts["rows"]["train"], facts["dropped"]) == (1, {})


TEXT = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "A bell."}]
