"""Samples with images: tokens and tensors as transformers gives them, and what is done once."""

import base64
import os
import shutil
import signal
from contextlib import suppress
from dataclasses import replace
from functools import cache
from io import BytesIO
from itertools import chain, product

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from penstock.cli.artifacts.prune import _unused_slices
from penstock.core.cache import noted_files
from penstock.core.cache.store import PlannedStage, get_or_build
from penstock.core.errors import CapabilityError, StageError
from penstock.media import decode as decode_module
from penstock.media.originals import ORIGINALS
from penstock.media.processor import NUM_IMAGES, ImageProcessor
from penstock.media.reference import image_digest
from penstock.prepare import slice_images, split, tokenize_slice
from penstock.prepare.bad_records import BadRecord
from penstock.prepare.formats.text_info import text_info
from penstock.prepare.locate_record import build_image_reader
from penstock.prepare.settings import DatasetSettings
from penstock.prepare.workers import MEDIA_COUNTS, _load_processor_once
from penstock.push.dataset import push_dataset
from penstock.rows.image_files import MEDIA, ImageFiles
from penstock.rows.pixel_table import concatenate
from penstock.rows.prepared import PreparedSamples
from tests.media.pictures import picture, png_header
from tests.media.tiny_processors import CHATML, FAMILIES, load_processor, write_processor
from tests.stages.prepared import contents, prepare, run, table_of, write_lines

CHAT = {"type": "chat"}
PICTURES = {f"{n}.jpg": picture(n, 30 + 17 * n, 90 - 11 * n, "JPEG") for n in range(6)}


def asking(*names, text="What is it?", answer="A cat."):
    parts = [{"type": "image", "path": name} for name in names]
    return [
        {"role": "user", "content": [*parts, {"type": "text", "text": text}]},
        {"role": "assistant", "content": answer},
    ]


def asking_url(url):
    part = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [part]}, {"role": "assistant", "content": "A cat."}]


def write_data(folder, conversations, name="data.jsonl"):
    for file, content in PICTURES.items():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content)
    return write_lines(folder / name, [{"messages": each} for each in conversations])


@cache
def loaded(folder):
    return load_processor(folder)


def expected(folder, conversation):
    """What transformers' processor gives for a whole conversation."""
    messages = [
        {
            **message,
            "content": [
                {"type": "image", "image": Image.open(BytesIO(PICTURES[part["path"]]))}
                if part["type"] == "image"
                else part
                for part in (
                    message["content"]
                    if isinstance(message["content"], list)
                    else [{"type": "text", "text": message["content"]}]
                )
            ],
        }
        for message in conversation
    ]
    options = {"processor_kwargs": {"return_tensors": "np"}, "return_dict": True}
    return loaded(folder).processor.apply_chat_template(messages, tokenize=True, **options)


def real_crops(pixels):
    """Those of all images, without crops of padding: the images of a sample are one there."""
    crops = pixels.reshape(-1, *pixels.shape[2:])
    return crops[crops.any(axis=(1, 2, 3))]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_tensors_are_bitwise_those_of_the_processor(tmp_path, family):
    model = write_processor(family, tmp_path / "model")
    several = [
        {"role": "system", "content": "Look."},
        *asking("0.jpg", "1.jpg", "2.jpg"),
        *asking("0.jpg", text="Again?"),
    ]
    conversations = [asking(), asking("3.jpg"), asking("1.jpg", "4.jpg", "1.jpg"), several]
    data = write_data(tmp_path / "data", conversations)
    artifact, facts = run(prepare((data, CHAT), tokenizer=str(model)), tmp_path / "out")
    assert (facts["dropped"], facts["images"]) == ({}, 8)
    table, files = table_of(artifact.path), ImageFiles.in_folder(artifact.path / MEDIA)
    token = loaded(model).token_id
    for row, conversation in zip(table.to_pylist(), conversations, strict=True):
        wanted = expected(model, conversation)
        assert row["input_ids"] == wanted.pop("input_ids")[0].tolist()
        images = files.inputs(row["images"])
        for name in images[0] if images else ():
            joined = concatenate([each[name] for each in images])
            theirs = wanted[name]
            if name == NUM_IMAGES:
                # Of each image rather than of each sample.
                joined, theirs = joined == 1, np.repeat(theirs, theirs) == 1
            if joined.ndim == 5 and family == "idefics3":
                joined, theirs = real_crops(joined), real_crops(theirs)
            assert joined.tobytes() == theirs.tobytes()
            assert (joined.shape, joined.dtype) == (theirs.shape, theirs.dtype)
        assert sum(row["image_tokens"]) == row["input_ids"].count(token)
        assert token not in row["labels"]
        assert any(label != -100 for label in row["labels"])


def test_an_image_alone_and_among_several_is_processed_once_in_each_form(tmp_path):
    model = write_processor("llava_onevision", tmp_path / "model")

    def processed(name, conversations):
        before = MEDIA_COUNTS.processed
        data = write_data(tmp_path / name, conversations)
        stage = prepare((data, CHAT), tokenizer=str(model), slices=tmp_path / "slices")
        artifact, _ = run(stage, tmp_path / f"{name}.out")
        return stage, artifact.path, MEDIA_COUNTS.processed - before

    alone = [asking("0.jpg"), asking("1.jpg")]
    assert processed("alone", alone)[2] == 2
    both = [*alone, asking("0.jpg", "2.jpg"), asking("2.jpg", "0.jpg"), asking("0.jpg")]
    stage, out, count = processed("both", both)
    assert count == 2
    files = ImageFiles.in_folder(out / MEDIA)
    read = build_image_reader(stage, out)
    rows = table_of(out).to_pylist()
    for number, (row, names) in enumerate(zip(rows, ("0", "1", "02", "20", "0"), strict=True)):
        originals = read(stage.slices()[0].key, number)
        assert [originals[digest] for digest in row["images"]] == [
            PICTURES[f"{name}.jpg"] for name in names
        ]
        shapes = [one["pixel_values"].shape for one in files.inputs(row["images"])]
        assert [shape[0:2] == (1, 1) for shape in shapes] == [len(names) > 1] * len(names)


def test_an_image_of_two_data_sets_has_the_size_that_each_of_them_sets(tmp_path):
    model = write_processor("qwen3_vl", tmp_path / "model")
    data = write_data(tmp_path / "data", [asking("0.jpg"), asking("5.jpg")])
    bounds = [{}, {"image_max_pixels": 2 * 32**2}, {"image_min_pixels": 6 * 32**2}]
    sources = [(data, {**CHAT, **its}) for its in bounds]
    stage = prepare(*sources, tokenizer=str(model), slices=tmp_path / "slices")
    artifact, _ = run(stage, tmp_path / "out")
    files = ImageFiles.in_folder(artifact.path / MEDIA)
    counts: set[int] = set()
    for row in table_of(artifact.path).to_pylist():
        grid = int(files.inputs(row["images"])[0]["image_grid_thw"].numpy().prod())
        assert row["image_tokens"] == [grid // 4]
        assert row["input_ids"].count(loaded(model).token_id) == grid // 4
        counts.add(grid // 4)
    assert min(counts) <= 2
    assert max(counts) >= 6
    assert len(counts) > 2
    read = build_image_reader(stage, artifact.path)
    for row in table_of(artifact.path).to_pylist():
        originals = read(stage.slices()[0].key, row["row"])
        assert originals[row["images"][0]] in PICTURES.values()


def test_one_more_image_is_one_more_decoded_and_another_template_none(tmp_path):
    model = write_processor("qwen3_vl", tmp_path / "model")
    slices = tmp_path / "slices"

    def processed(name, conversations, tokenizer):
        before = MEDIA_COUNTS.processed
        stage = prepare(
            (write_data(tmp_path / name, conversations), CHAT),
            tokenizer=str(tokenizer),
            slices=slices,
        )
        artifact, _ = run(stage, tmp_path / f"{name}.out")
        return artifact, MEDIA_COUNTS.processed - before

    four = [asking(f"{n}.jpg") for n in range(4)]
    first, count = processed("four", four, model)
    assert count == 4
    _, count = processed("five", [*four, asking("4.jpg")], model)
    assert count == 1
    other = write_processor(
        "qwen3_vl",
        tmp_path / "other",
        CHATML.replace("IMAGE", "Picture: <|vision_start|><|image_pad|><|vision_end|>"),
    )
    third, count = processed("again", four, other)
    assert count == 0
    assert table_of(first.path)["input_ids"] != table_of(third.path)["input_ids"]
    files = [sorted((each.path / MEDIA).iterdir()) for each in (first, third)]
    assert [[f.stat().st_ino for f in of] for of in files[:1]] == [
        [f.stat().st_ino for f in of] for of in files[1:]
    ]


def test_every_form_of_data_gives_the_same_sample(tmp_path):
    model = write_processor("qwen3_vl", tmp_path / "model")
    data = tmp_path / "data"
    content = PICTURES["1.jpg"]
    uri = f"data:image/jpeg;base64,{base64.b64encode(content).decode()}"
    text, answer = {"type": "text", "text": "\nWhat?"}, {"role": "assistant", "content": "A cat."}

    def chat(*parts):
        return {"messages": [{"role": "user", "content": [*parts, text]}, answer]}

    plain = [{"role": "user", "content": "<image>\nWhat?"}, answer]
    shared = [
        {"from": "human", "value": "<image>\nWhat?"},
        {"from": "gpt", "value": "A cat."},
    ]
    write_data(data, [])
    sources = {
        "parts.jsonl": [
            chat({"type": "image", "path": "1.jpg"}),
            chat({"type": "image", "url": uri}),
            chat({"type": "image", "image": "1.jpg"}),
            chat({"type": "image", "base64": uri.partition(",")[2]}),
            chat({"type": "image_url", "image_url": {"url": uri}}),
            chat({"type": "input_image", "image_url": "1.jpg"}),
            {**chat({"type": "image"}), "images": ["1.jpg"]},
        ],
        "columns.jsonl": [
            {"messages": plain, "images": ["1.jpg"]},
            {"messages": plain, "image": "1.jpg"},
            {"messages": plain, "images": [{"path": "1.jpg"}]},
        ],
        "shared.jsonl": [{"conversations": shared, "image": "1.jpg"}],
        "alpaca.jsonl": [
            {"instruction": "<image>\nWhat?", "output": "A cat.", "images": ["1.jpg"]}
        ],
    }
    sources["ernie.jsonl"] = [
        {
            "text_info": [
                {"text": "\nWhat?", "tag": "mask"},
                {"text": "A cat.", "tag": "no_mask"},
            ],
            "image_info": [{"matched_text_index": 0, "image_url": "1.jpg"}],
        }
    ]
    kinds = {"shared.jsonl": "sharegpt", "alpaca.jsonl": "alpaca", "ernie.jsonl": "sft_turns"}
    types = {name: {"type": kind} for name, kind in kinds.items()}
    named = [
        (write_lines(data / name, lines), types.get(name, CHAT)) for name, lines in sources.items()
    ]
    image = {"bytes": content, "path": "somewhere.jpg"}
    pq.write_table(
        pa.Table.from_pylist([{"messages": plain, "images": [image]}]), data / "columns.parquet"
    )
    named.append((data / "columns.parquet", CHAT))
    artifact, facts = run(prepare(*named, tokenizer=str(model)), tmp_path / "out")
    assert facts["dropped"] == {}
    rows = table_of(artifact.path).to_pylist()
    assert len(rows) == 14
    assert {tuple(row["input_ids"]) for row in rows} == {tuple(rows[0]["input_ids"])}
    assert {tuple(row["images"]) for row in rows} == {(image_digest(content),)}
    table = PreparedSamples(artifact.path, "train").table()
    assert table.column("images").to_pylist() == [[image_digest(content)]] * 14


BAD = {
    "a literal image token": (asking("0.jpg", text="<|image_pad|>"), "stands for an image"),
    "a missing file": (asking("9.jpg"), "image 9.jpg: there is no"),
    "a path out of the folder": (asking("../secret.jpg"), "is outside of"),
    "the web offline": (asking_url("https://example.invalid/a.png"), "HF_HUB_OFFLINE is set"),
    "an image of the assistant": (
        [asking()[0], {"role": "assistant", "content": asking("0.jpg")[0]["content"]}],
        "no answer can hold",
    ),
}


FILES = {
    "truncated.jpg": (picture(7, 99, 99, "JPEG")[:900], "image file is truncated"),
    "bomb.png": (png_header(20_000, 20_000), "too many pixels"),
    "drawing.svg": (b"<svg/>", "an SVG drawing"),
    "text.png": (b"no image", "not an image that can be decoded"),
    "empty.png": (b"", "it is empty"),
    "thin.png": (picture(7, 1200, 2), "the image processor refuses it"),
}
BAD |= {name: (asking(name), why) for name, (_, why) in FILES.items()}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_a_bad_record_with_its_line_and_cause(tmp_path, monkeypatch, name):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    conversation, why = BAD[name]
    model = write_processor("qwen3_vl", tmp_path / "model")
    data = write_data(tmp_path / "data", [asking("0.jpg"), conversation])
    for file, (content, _) in FILES.items():
        (data.parent / file).write_bytes(content)
    stage = prepare((data, CHAT), tokenizer=str(model), bad_rows_allowed=0.5)
    _, facts = run(stage, tmp_path / "out")
    [example] = facts["dropped_samples"]
    assert (example["file"], example["line"], facts["images"]) == ("data.jsonl", 2, 1)
    assert why in example["why"]
    if name in FILES:
        assert example["why"].startswith(name)


@pytest.mark.parametrize("family", [None, "qwen3_vl"])
def test_images_and_places_that_do_not_match_are_bad_records(tmp_path, family):
    messages = [{"role": "user", "content": "<image> and <image>"}, asking()[1]]
    write_data(tmp_path / "data", [])
    data = write_lines(
        tmp_path / "data" / "data.jsonl",
        [{"messages": messages, "images": ["0.jpg"]}, {"messages": asking(), "other": 1}],
    )
    tokenizer = str(write_processor(family, tmp_path / "model")) if family else "builtin:bytes"
    _, facts = run(
        prepare((data, CHAT), tokenizer=tokenizer, bad_rows_allowed=1.0), tmp_path / "out"
    )
    assert facts["dropped"] == {"bad_value": 1}
    assert "1 images" in facts["dropped_samples"][0]["why"]


def test_a_model_without_an_image_processor_refuses_images(tmp_path):
    data = write_data(tmp_path / "data", [asking("0.jpg")])
    with pytest.raises(StageError, match="the model has no image processor"):
        run(prepare((data, CHAT)), tmp_path / "out")


@pytest.mark.slow
def test_a_sample_is_never_cut_within_an_image(tmp_path):
    model = write_processor("qwen3_vl", tmp_path / "model")
    turns = [*asking("5.jpg", "4.jpg"), *asking("0.jpg", text="x")]
    data = write_data(tmp_path / "data", [turns, asking("0.jpg")])
    whole, _ = run(prepare((data, CHAT), tokenizer=str(model)), tmp_path / "whole")
    lengths = [len(ids) for ids in table_of(whole.path)["input_ids"].to_pylist()]
    its = {**CHAT, "max_seq_len": max(lengths) - 1, "truncation_mode": "drop_turns"}
    fitted, facts = run(prepare((data, its), tokenizer=str(model)), tmp_path / "fitted")
    rows = table_of(fitted.path).to_pylist()
    assert (facts["turns_dropped"], facts["images"]) == (1, 2)
    assert [row["images"] for row in rows] == [[image_digest(PICTURES["0.jpg"])]] * 2
    token, whole_rows = load_processor(model).token_id, table_of(whole.path).to_pylist()
    tokens = {tuple(row["images"]): row["input_ids"].count(token) for row in whole_rows}
    for mode, limit in product(("keep_end", "keep_start"), range(30, max(lengths), 25)):
        its = {**CHAT, "max_seq_len": limit, "truncation_mode": mode}
        stage = prepare((data, its), tokenizer=str(model))
        with suppress(StageError):  # where none of the two is left
            cut, facts = run(stage, tmp_path / f"{mode}{limit}")
            rows = table_of(cut.path).to_pylist()
            assert len(rows) + sum(facts["dropped"].values()) == 2
            for row in rows:
                assert len(row["input_ids"]) <= limit
                count = tokens[tuple(row["images"])]
                assert row["input_ids"].count(token) == sum(row["image_tokens"]) == count


def test_the_same_text_with_another_image_is_no_duplicate(tmp_path):
    model = write_processor("llava", tmp_path / "model")
    data = write_data(tmp_path / "data", [asking("0.jpg"), asking("1.jpg"), asking("0.jpg")])
    stage = prepare((data, CHAT), tokenizer=str(model), deduplicate="exact")
    artifact, facts = run(stage, tmp_path / "out")
    assert facts["dropped"] == {"exact_duplicate": 1}
    images = chain.from_iterable(table_of(artifact.path)["images"].to_pylist())
    assert [*images] == [image_digest(PICTURES[name]) for name in ("0.jpg", "1.jpg")]


def test_text_beside_images_is_stored_as_before(tmp_path):
    model = write_processor("qwen3_vl", tmp_path / "model")
    text = write_lines(tmp_path / "text.jsonl", [{"messages": asking()}] * 3)
    images = write_data(tmp_path / "data", [asking("0.jpg")])
    alone, _ = run(prepare((text, CHAT), tokenizer=str(model)), tmp_path / "alone")
    both, _ = run(prepare((text, CHAT), (images, CHAT), tokenizer=str(model)), tmp_path / "both")
    its = contents(alone.path / "data")
    assert {name: contents(both.path / "data")[name] for name in its} == its
    assert not (alone.path / MEDIA).exists()
    assert "images" not in (alone.path / "plan.json").read_text()
    samples = PreparedSamples(both.path, "train")
    assert [len(samples.sample(at).images) for at in range(4)] == [0, 0, 0, 1]


def killed_at(stage, out, place, calls, monkeypatch):
    """Run the stage in a child process that is killed in a call of the function at `place`."""
    child = os.fork()
    if not child:
        owner, name = place
        real, count = getattr(owner, name), iter(range(100))

        def killing(*args, **options):
            if next(count) == calls:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        monkeypatch.setattr(owner, name, killing)
        with suppress(BaseException):
            run(stage, out)
        os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "calls"),
    [
        ((slice_images, "read_image"), 2),
        ((ImageProcessor, "process"), 2),
        ((noted_files, "write_record"), 0),
        ((tokenize_slice, "_to_record_batch"), 0),
        ((split, "link"), 1),
    ],
    ids=["reading", "processing", "noting", "encoding", "linking"],
)
def test_killed_at_any_moment_a_rerun_gives_the_same_bytes(tmp_path, monkeypatch, place, calls):
    model = write_processor("qwen3_vl", tmp_path / "model")
    data = write_data(tmp_path / "data", [asking(f"{n}.jpg") for n in range(4)])
    stage = prepare((data, CHAT), tokenizer=str(model))
    whole, facts = run(stage, tmp_path / "whole")
    assert killed_at(stage, tmp_path / "out", place, calls, monkeypatch) == signal.SIGKILL
    artifact, again = run(stage, tmp_path / "out")
    assert (contents(artifact.path), again) == (contents(whole.path), facts)


def test_without_pillow_data_with_images_says_what_to_install(tmp_path, monkeypatch):
    model = write_processor("qwen3_vl", tmp_path / "model")
    monkeypatch.setattr(decode_module, "find_spec", lambda _: None)
    _load_processor_once.cache_clear()
    text = write_lines(tmp_path / "text.jsonl", [{"messages": asking()}])
    run(prepare((text, CHAT), tokenizer=str(model)), tmp_path / "text")
    data = write_data(tmp_path / "data", [asking("0.jpg")])
    with pytest.raises(CapabilityError, match=r"pip install 'penstock\[vision\]'"):
        run(prepare((data, CHAT), tokenizer=str(model)), tmp_path / "out")


def test_slices_whose_images_are_gone_are_made_again(tmp_path):
    model = write_processor("qwen3_vl", tmp_path / "model")
    data = write_data(tmp_path / "data", [asking(f"{n}.jpg") for n in range(4)])
    stage = prepare((data, CHAT), tokenizer=str(model), slices=tmp_path / "slices")
    first, _ = run(stage, tmp_path / "first")
    shutil.rmtree(tmp_path / "slices" / MEDIA)
    second, _ = run(stage, tmp_path / "second")
    assert contents(first.path) == contents(second.path)


@pytest.mark.exhaustive
def test_of_several_processes_each_slice_has_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.prepare.workers.MIN_BYTES_PER_PROCESS", 1)
    model = write_processor("qwen3_vl", tmp_path / "model")
    data = [
        (write_data(tmp_path / "data", [asking(f"{n}.jpg", f"{n + 1}.jpg")], f"{n}.jsonl"), CHAT)
        for n in range(4)
    ]
    one, _ = run(prepare(*data, tokenizer=str(model)), tmp_path / "one")
    two, _ = run(prepare(*data, tokenizer=str(model), num_proc=2), tmp_path / "two")
    assert contents(one.path) == contents(two.path)


def test_images_that_no_result_uses_can_be_pruned_after_a_day(tmp_path):
    model = write_processor("qwen3_vl", tmp_path / "model")
    data, cache = write_data(tmp_path / "data", [asking("0.jpg")]), tmp_path / "root" / "slices"
    uri = f"data:image/jpeg;base64,{base64.b64encode(PICTURES['1.jpg']).decode()}"
    other = write_data(tmp_path / "data", [asking(uri)], "other.jsonl")
    steps = [
        PlannedStage(prepare((path, CHAT), tokenizer=str(model)), tmp_path / "root" / "prepare" / n)
        for n, path in (("one", data), ("two", other))
    ]
    for step in steps:
        get_or_build(step)
    files = {path for path in cache.rglob("*") if path.is_file()}
    assert not [*_unused_slices(cache, [], [], 0)]
    for path in files:
        os.utime(path, (1, 1))
    originals = cache / MEDIA / ORIGINALS
    [kept] = [path for path in originals.rglob("*") if path.is_file()]
    assert [*_unused_slices(cache, [], [], 0)] == [[kept]]  # the others have links
    shutil.rmtree(steps[0].path)
    gone = {path for paths in _unused_slices(cache, [], [], 0) for path in paths}
    linked = {path.stem for path in (steps[1].path / MEDIA).iterdir()}
    assert files - gone == {path for path in files if path.stem in linked | slices_of(steps[1])}


def slices_of(step):
    return {path.stem.partition("-")[2] for path in step.path.rglob("slice-*.arrow")}


@pytest.mark.slow
def test_machines_that_share_a_cache_process_an_image_once(tmp_path):
    model = write_processor("qwen3_vl", tmp_path / "model")
    data = write_data(tmp_path / "data", [asking("0.jpg"), asking("1.jpg")])
    stage = replace(
        prepare((data, CHAT), tokenizer=str(model)), slices_url="memory://shared-images/slices"
    )
    before = MEDIA_COUNTS.processed
    first, _ = run(stage, tmp_path / "first")
    second, _ = run(stage, tmp_path / "second")
    assert MEDIA_COUNTS.processed == before + 2
    assert contents(first.path) == contents(second.path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"text_info": []}, "text_info is empty"),
        ({"text_info": [{"text": "x", "tag": "?"}]}, "tag is not mask or no_mask"),
        ({"image_info": [{"matched_text_index": 2, "image_url": "0.jpg"}]}, "there are 2 texts"),
        ({"image_info": [{"matched_text_index": 1, "image_url": "0.jpg"}]}, "no answer can hold"),
        ({"image_info": [{"matched_text_index": 0}]}, "has no image_url"),
        ({"video_info": [{}]}, "it has video_info"),
    ],
    ids=["empty", "tag", "index", "answer", "url", "video"],
)
def test_what_is_wrong_with_text_info_is_said(change, why):
    texts = [{"text": "Which?", "tag": "mask"}, {"text": "This.", "tag": "no_mask"}]
    with pytest.raises(BadRecord, match=why):
        text_info(DatasetSettings(type="sft_turns"), {"text_info": texts, **change})


def test_data_with_images_is_not_pushed_without_them(tmp_path):
    model = write_processor("llava", tmp_path / "model")
    data = write_data(tmp_path / "data", [asking("0.jpg")])
    artifact, _ = run(prepare((data, CHAT), tokenizer=str(model)), tmp_path / "out")
    with pytest.raises(CapabilityError, match="has images, whose tensors are not pushed"):
        push_dataset(artifact, "someone/data")
