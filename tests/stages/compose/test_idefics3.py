"""Pixel shuffle: a SigLIP tower before a text model as Idefics3, judged by transformers."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from penstock.core.errors import CapabilityError
from penstock.media.processor import load_image_processor
from penstock.rows.tokenizer import load_tokenizer
from tests.cli.command import penstock as said
from tests.pipeline.runs import penstock, write_run
from tests.stages.compose.test_llava import compose, rows, write_encoder, write_text

SIDE = 6
"""Patches along the side of an image."""


def write_siglip(folder, side=SIDE):
    """A SigLIP with its own image processor, of `side` x `side` patches."""
    config = transformers.SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        num_hidden_layers=2,
        image_size=side * 4,
        patch_size=4,
    )
    torch.manual_seed(1)
    transformers.SiglipVisionModel(config).save_pretrained(folder)
    size = {"height": side * 4, "width": side * 4}
    processor = transformers.SiglipImageProcessorPil(size=size, image_mean=[0.4, 0.5, 0.6])
    processor.save_pretrained(folder)
    return folder


def loaded(folder):
    return transformers.Idefics3ForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32
    )


def shuffled(features, scale):
    """Each square of `scale` x `scale` neighbours as one feature, row by row: [N, side², W]."""
    count, patches, width = features.shape
    side = round(patches**0.5)
    grid = features.reshape(count, side // scale, scale, side // scale, scale, width)
    return grid.transpose(2, 3).reshape(count, (side // scale) ** 2, scale**2 * width)


@pytest.mark.parametrize("scale", [2, 3])
def test_its_parts_compute_what_they_did_and_an_image_takes_fewer_tokens(tmp_path, scale):
    text = write_text(tmp_path / "text", vocab_size=258, tie_word_embeddings=False)
    encoder = write_siglip(tmp_path / "encoder")
    out = tmp_path / "whole"
    facts = compose(text, encoder, out, projector="pixel_shuffle", scale_factor=scale, seed=3)
    whole: Any = loaded(out)
    assert facts["parameters"] == sum(one.numel() for one in whole.parameters())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(text, dtype=torch.float32)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(whole(input_ids=ids).logits[..., :258], theirs(input_ids=ids).logits)
    assert torch.allclose(rows(whole)[258:], rows(theirs).mean(0).expand(4, -1), atol=1e-7)

    pixels = np.random.default_rng(0).integers(0, 256, (30, 50, 3)).astype(np.uint8)
    own = transformers.AutoImageProcessor.from_pretrained(encoder, backend="pil")
    values = own(Image.fromarray(pixels), return_tensors="pt")["pixel_values"]
    tower: Any = transformers.SiglipVisionModel.from_pretrained(encoder, dtype=torch.float32)
    projection = whole.model.connector.modality_projection.proj
    with torch.no_grad():
        [features] = whole.get_image_features(values[None]).pooler_output
        wanted = projection(shuffled(tower(values).last_hidden_state, scale))
    assert torch.equal(features, wanted[0])

    found = load_image_processor(str(out), None, load_tokenizer(str(out)))
    assert found is not None
    tensors = found.process(Image.fromarray(pixels))
    assert np.array_equal(tensors["pixel_values"].numpy()[0], values.numpy())
    tokens = load_tokenizer(str(out))(found.replacement(tensors))["input_ids"]
    assert tokens.count(facts["image_token_id"]) == len(features) == (SIDE // scale) ** 2
    assert len(tokens) == len(features) + 3


def test_towers_that_idefics3_has_no_place_for_are_refused_before_any_work(tmp_path):
    text = write_text(tmp_path / "text")
    siglip = write_siglip(tmp_path / "siglip")
    cropped = write_encoder(tmp_path / "cropped", "siglip_vision_model")
    for encoder, scale, why in (
        (write_encoder(tmp_path / "clip", "clip"), 2, "a class token, and a norm before"),
        (write_encoder(tmp_path / "dinov2", "dinov2"), 2, "a class token, and scales"),
        (siglip, 4, r"has 6 features along the side .*\n  Write one of: 2, 3, 6"),
        (cropped, 2, "crops images"),
        (write_siglip(tmp_path / "odd", 19), 19, r"19 x 19 patches .* other positions than"),
    ):
        with pytest.raises(CapabilityError, match=why):
            compose(text, encoder, tmp_path / "w", projector="pixel_shuffle", scale_factor=scale)
        assert not (tmp_path / "w").exists()
    words = ("models", "compose", text, "--image", siglip, "-o", tmp_path / "w")
    assert "--scale-factor is of a pixel shuffle" in said(*words, "--scale-factor", 3).err


@pytest.mark.dist
@pytest.mark.exhaustive
def test_a_run_with_a_pixel_shuffle_trains_its_projector_and_exports_for_transformers(tmp_path):
    image = {"config_path": "builtin:tiny-siglip", "projector": "pixel_shuffle"}
    model = {
        "config_path": "builtin:tiny-llama",
        "foundation": {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48},
        "encoders": {"image": image},
        "freeze": ["vision", "language"],
    }
    data = {
        "datasets": [{"path": "builtin:shapes", "type": "chat", "max_samples": 24}],
        "sample_packing_sequence_len": 256,
        "val_set_size": 0,
    }
    states = []
    for encode in (False, True):
        folder = tmp_path / str(encode)
        train = {"global_batch_size": 4, "num_train_epochs": 1}
        config = write_run(folder, model=model, data={**data, "encode_images": encode}, train=train)
        penstock("run", config)
        [whole] = (folder / "artifacts/compose").glob("[0-9a-f]*/hf")
        [exported] = (folder / "artifacts/export").glob("*/hf")
        was, now = loaded(whole).state_dict(), loaded(exported).state_dict()
        for name, tensor in was.items():
            assert torch.equal(tensor, now[name]) is ("connector" not in name), name
        states.append(now)
    for name, tensor in states[0].items():
        assert torch.allclose(tensor, states[1][name], atol=1e-6), name
    processor: Any = transformers.AutoProcessor.from_pretrained(exported)
    assert processor.image_seq_len == 4
