"""Images of every kind, and texts that look like images."""

from io import BytesIO

import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image

from penstock.core.errors import StageError
from penstock.media.reference import image_digest
from penstock.rows.image_files import MEDIA, ImageFiles
from penstock.rows.tokenizer import load_tokenizer
from tests.media.pictures import encoded, exif_of
from tests.media.tiny_processors import FAMILIES, write_processor
from tests.stages.prepare.media.test_images import CHAT, FILES, PICTURES, asking, loaded, write_data
from tests.stages.prepared import prepare, run, table_of, write_lines

KINDS = {
    "named.png": ("0.jpg", {}),  # a JPEG
    "cmyk.jpg": ("CMYK", {}),
    "rotated.jpg": ("RGB", {"exif": exif_of(6)}),
    "animated.gif": ("RGB", {"save_all": True, "append_images": [Image.new("RGB", (64, 48))]}),
    "palette.png": ("P", {}),
    "transparent.png": ("RGBA", {}),
}


def test_images_of_every_kind_are_read_and_none_is_lost_beside_a_bad_one(tmp_path):
    model = write_processor("qwen3_vl", tmp_path / "model")
    names = [*KINDS, "truncated.jpg"]
    data = write_data(tmp_path / "data", [asking(name) for name in names])
    colours = np.random.default_rng(0).integers(0, 256, (3, 4, 3)).astype(np.uint8)
    image = Image.fromarray(colours).resize((64, 48))
    for name, (mode, options) in KINDS.items():
        kind = {"jpg": "JPEG", "gif": "GIF", "png": "PNG"}[name[-3:]]
        content = PICTURES.get(mode) or encoded(image.convert(mode), kind, **options)
        (data.parent / name).write_bytes(content)
    (data.parent / "truncated.jpg").write_bytes(FILES["truncated.jpg"][0])
    stage = prepare((data, CHAT), tokenizer=str(model), bad_rows_allowed=0.5)
    artifact, facts = run(stage, tmp_path / "out")
    files = ImageFiles.in_folder(artifact.path / MEDIA)
    assert (facts["images"], facts["dropped"]) == (len(KINDS), {"bad_value": 1})
    for row, name in zip(table_of(artifact.path).to_pylist(), KINDS, strict=True):
        content = (data.parent / name).read_bytes()
        assert row["images"] == [image_digest(content)]
        theirs = loaded(model).processor.image_processor(load_image(Image.open(BytesIO(content))))
        mine = files.inputs(row["images"])[0]["pixel_values"].numpy()
        assert mine.tobytes() == np.asarray(theirs["pixel_values"]).tobytes()


def tokenized(model, text):
    ids = loaded(model).processor.tokenizer(text)["input_ids"]
    return {"input_ids": ids, "labels": ids}


def test_an_image_token_in_a_text_stands_for_no_image(tmp_path):
    model = write_processor("qwen3_vl", tmp_path / "model")
    write_data(tmp_path / "data", [])
    bad, good = "See <|image_pad|>.", "See <image>, <img> and image_pad."
    forms = [
        ("chat", lambda text: {"messages": asking("0.jpg", text=text)}),
        ("chat", lambda text: {"messages": asking(text=text)}),
        ("text", lambda text: {"text": text}),
        ("tokenized", lambda text: tokenized(model, text)),
    ]
    sources = [
        (write_lines(tmp_path / "data" / f"{at}.jsonl", [form(bad), form(good)]), {"type": kind})
        for at, (kind, form) in enumerate(forms)
    ]
    stage = prepare(*sources, tokenizer=str(model), bad_rows_allowed=0.5)
    artifact, facts = run(stage, tmp_path / "out")
    why = "its text has <|image_pad|>, which stands for an image"
    assert {each["why"] for each in facts["dropped_samples"]} == {why}
    assert facts["dropped"] == {"bad_value": len(forms)}
    rows = table_of(artifact.path)["input_ids"].to_pylist()
    told = [load_tokenizer(str(model)).decode(ids) for ids in rows]
    assert ["See <image>, <img> and image_pad." in text for text in told] == [True] * len(forms)


def test_a_placeholder_without_an_image_is_text_unless_it_is_the_image_token(tmp_path):
    data = write_lines(tmp_path / "data.jsonl", [{"text": "Is <image> HTML?"}])
    named = {family: str(write_processor(family, tmp_path / family)) for family in FAMILIES[1:3]}
    text = {"type": "text"}
    run(prepare((data, text), tokenizer=named["qwen3_vl"]), tmp_path / "qwen")
    with pytest.raises(StageError, match="its text has <image>, which stands for an image"):
        run(prepare((data, text), tokenizer=named["llava"]), tmp_path / "llava.out")
