"""Images processed one by one equal transformers' processors; files of them are deterministic."""

import json
import sys
from importlib import import_module
from io import BytesIO

import numpy as np
import pytest
from PIL import Image
from transformers import AutoImageProcessor

from penstock.core.errors import CapabilityError
from penstock.media.cache import MediaCache
from penstock.media.decode import decode
from penstock.media.processor import load_image_processor
from penstock.media.reference import image_digest
from penstock.rows.image_files import ImageFiles, StoredImage, write_images
from penstock.rows.pixel_table import concatenate, stored
from penstock.rows.tokenizer import load_tokenizer
from tests.media.pictures import picture
from tests.media.tiny_processors import FAMILIES, load_processor, write_processor

PIXTRAL = "transformers.models.pixtral"
PICTURES = [picture(1, 60, 40), picture(2, 31, 90, "JPEG"), picture(3, 200, 130, "JPEG")]


@pytest.mark.parametrize("family", FAMILIES)
def test_images_alone_are_bitwise_those_of_a_batch(tmp_path, family):
    mine = load_processor(write_processor(family, tmp_path))
    theirs = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    images = [Image.open(BytesIO(p)) for p in PICTURES]
    images = [[image] for image in images] if mine.nested else images
    tells = {"return_row_col_info": True} if family == "idefics3" else {}
    wanted = theirs(images, return_tensors="np", **tells)
    found = [mine.process(decode(each)) for each in PICTURES]
    if family == "idefics3":
        # What the model makes of crops that are not padding.
        ones = wanted["pixel_values"].any(axis=2).astype(np.int64)
        assert np.array_equal(wanted.pop("pixel_attention_mask"), ones)
        assert len({each["pixel_values"].shape for each in found}) > 1
    if family not in ("llava_next", "llava_onevision"):
        assert all(each["pixel_values"].content.dtype == np.uint8 for each in found)
    assert found[0].keys() == wanted.keys()
    for name, theirs_all in wanted.items():
        values, joined = np.asarray(theirs_all), concatenate([each[name] for each in found])
        assert (joined.dtype, joined.tobytes()) == (values.dtype, values.tobytes())


def test_the_key_follows_the_settings_of_the_image_processor_alone(tmp_path):
    keys = [
        load_processor(write_processor("qwen3_vl", tmp_path / name, template)).key
        for name, template in (("a", None), ("b", "{{ messages }}"))
    ]
    change(tmp_path / "b" / "preprocessor_config.json", patch_size=8)
    keys.append(load_processor(tmp_path / "b").key)
    assert keys[0] == keys[1] != keys[2]


def test_a_model_without_an_image_processor_has_none(tmp_path):
    write_processor("llava", tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").unlink()
    tokenizer = load_tokenizer(str(tmp_path))
    assert load_image_processor(str(tmp_path), None, tokenizer) is None
    assert load_image_processor("builtin:bytes", None, None) is None


def test_images_and_texts_of_pixtral_are_those_of_its_processor(tmp_path, monkeypatch):
    mine = load_processor(write_processor("mistral3", tmp_path))
    # Their module takes a function of sizes from one that imports torchvision.
    sizes = import_module(f"{PIXTRAL}.image_processing_pil_pixtral")
    monkeypatch.setitem(sys.modules, f"{PIXTRAL}.image_processing_pixtral", sizes)
    cls = import_module(f"{PIXTRAL}.processing_pixtral").PixtralProcessor
    settings = json.loads((tmp_path / "processor_config.json").read_text())
    settings.pop("processor_class")
    own = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    theirs = cls(own, load_tokenizer(str(tmp_path)), **settings)
    wanted = theirs(
        text=["a[IMG]b[IMG][IMG]c"],
        images=[Image.open(BytesIO(each)) for each in PICTURES],
        return_tensors="np",
    )
    found = [mine.process(decode(each)) for each in PICTURES]
    assert {each["pixel_values"].content.dtype for each in found} == {np.dtype(np.uint8)}
    for name in ("pixel_values", "image_sizes"):
        joined = concatenate([each[name] for each in found])
        assert (joined.dtype, joined.tobytes()) == (wanted[name].dtype, wanted[name].tobytes())
    texts = [mine.replacement(each) for each in found]
    ids = mine.processor.tokenizer(f"a{texts[0]}b{texts[1]}{texts[2]}c")["input_ids"]
    assert ids == wanted["input_ids"][0].tolist()
    assert mine.token_id == theirs.image_token_ids[0]


def test_processors_that_treat_images_together_or_need_more_packages_are_refused(tmp_path):
    write_processor("llava", tmp_path)
    change(tmp_path / "processor_config.json", processor_class="GotOcr2Processor")
    with pytest.raises(CapabilityError, match="cannot be processed one by one"):
        load_processor(tmp_path)


def change(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_files_keep_tensors_and_faults_and_have_the_same_bytes(tmp_path):
    some = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.ones(1)}
    nothing = {"x": np.zeros((0, 3), np.float32), "n": np.zeros(1)}
    images = [
        StoredImage(b"0" * 32, {}, error="it is damaged"),
        StoredImage(b"a" * 32, {name: stored(each) for name, each in some.items()}),
        StoredImage(b"b" * 32, {name: stored(each) for name, each in nothing.items()}, (7, 9)),
    ]
    for name in ("a", "b"):
        assert write_images(tmp_path / name, iter(images), frozenset({"n"})) == 3
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    files = ImageFiles([tmp_path / "a"])
    assert files.get(b"0" * 32) == images[0]
    for image in images[1:]:
        found = files.get(image.digest)
        assert found is not None
        assert found.size == image.size
        assert all(
            np.array_equal(found.tensors[n].numpy(), v.numpy()) for n, v in image.tensors.items()
        )
        assert [*files.inputs([image.digest])[0]] == ["x"]
    assert files.get(b"c" * 32) is None
    assert files.get(b"a" * 8 + b"c" * 24) is None
    assert ImageFiles([]).get(b"a" * 32) is None


def test_of_images_that_another_file_has_only_the_new_one_is_processed(tmp_path):
    cache = MediaCache(tmp_path, load_processor(write_processor("qwen3_vl", tmp_path / "model")))
    by_digest = {image_digest(each): each for each in PICTURES}
    digests, read = [*by_digest], by_digest.__getitem__
    first, _ = cache.get_or_process(digests[:2], read)
    assert (cache.counts.used, cache.counts.processed) == (2, 2)
    second, images = cache.get_or_process([digests[2], *digests[:2]], read)
    assert cache.counts.processed == 3
    again, _ = cache.get_or_process(digests[:2], read)
    assert (again, cache.counts.processed) == (first, 3)
    fresh = MediaCache(tmp_path / "other", cache.processor)
    assert fresh.get_or_process([digests[2], *digests[:2]], read)[0] == second
    files = [root / "media" / f"{second}.arrow" for root in (tmp_path, tmp_path / "other")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert all(images.get(digest) for digest in digests)
