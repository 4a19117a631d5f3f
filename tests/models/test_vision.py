"""Models with images, judged by transformers: their logits, losses and gradients."""

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from penstock.core.errors import CapabilityError, StageError
from penstock.losses.cross_entropy import Loss, LossOptions, sum_cross_entropy
from penstock.models.automodel.media.inputs import media_inputs, with_each_counted
from penstock.models.multimodal import MULTIMODAL
from penstock.models.vision.positions import image_places, mrope_positions
from penstock.models.vision.types import VISION, VISION_TYPES, WHY_NOT, read_vision
from tests.models.images import (
    IMAGE,
    image_documents,
    image_model,
    image_twins,
    joined,
    micro_batch,
    random_images,
    their_logits,
)
from tests.models.multimodal import CONFIGS, TEXT
from tests.models.twins import assert_gradients_equal, gradients

NUMBERS = [1, 0, 3]
"""Images of each document."""


OFTEN = ("gemma3", "llava", "qwen2_5_vl", "qwen3_vl")


def marked(names):
    """Model types as parameters of a test that is exhaustive but for those of `OFTEN`."""
    return [
        pytest.param(name, marks=() if name in OFTEN else pytest.mark.exhaustive) for name in names
    ]


def loss_fn(labels):
    return lambda hidden, head: sum_cross_entropy(
        hidden, head, labels, Loss(LossOptions(), chunk=11)
    )


@pytest.mark.slow
@pytest.mark.parametrize("model_type", marked(VISION_TYPES))
def test_logits_and_every_gradient_on_packed_images_are_those_of_transformers(model_type):
    both = image_twins(model_type)
    ids, labels, images = image_documents(model_type, NUMBERS)
    wanted = torch.cat([their_logits(both.theirs, *one) for one in zip(ids, images, strict=True)])
    batch = micro_batch(ids, labels, images)
    found = both.run(batch)
    assert (found - wanted).norm() <= 1e-5 * wanted.norm()
    theirs = nn.functional.cross_entropy(wanted, batch.labels_T, reduction="sum")
    theirs.backward()
    ours = both.run(batch, loss_fn(batch.labels_T))
    ours.backward()
    assert torch.allclose(ours, theirs, rtol=1e-5)
    expected = both.stored_gradients()
    got = gradients(both.ours)
    assert any(name.startswith(VISION) for name in expected)
    of_vision = {name for name in expected if name.startswith(VISION)}
    # Of the rest transformers has none, and here they are absent too.
    assert got.keys() == expected.keys()
    for name in [name for name in expected if name.endswith("k_proj.bias") and VISION in name]:
        # It adds the same to all scores of a token, which changes nothing.
        least = 1e-5 * expected[name.replace("k_proj", "v_proj")].norm()
        assert max(got.pop(name).norm(), expected.pop(name).norm()) < least
    assert_gradients_equal(got, expected)
    # Each alone, one of them without images: the vision part has gradients of zeros.
    for one in zip(ids, labels, images, strict=True):
        alone = micro_batch([one[0]], [one[1]], [one[2]])
        own = their_logits(both.theirs, one[0], one[2])
        assert (both.run(alone) - own).norm() <= 1e-5 * own.norm()
    both.ours.zero_grad()
    both.run(micro_batch(ids[1:2], labels[1:2], images[1:2])).sum().backward()
    zeros = {n: p for n, p in gradients(both.ours).items() if n.startswith(VISION)}
    assert zeros.keys() == of_vision
    assert not any(one.any() for one in zeros.values())


@pytest.mark.parametrize(
    "model_type", marked(name for name, kind in VISION_TYPES.items() if kind.mrope)
)
def test_positions_are_those_of_transformers_and_documents_start_anew(model_type):
    model = image_model(model_type).model
    ids, labels, images = image_documents(model_type, [2, 0, 1])
    batch = micro_batch(ids, labels, images)
    assert batch.images is not None
    counts = batch.images.token_counts
    found = mrope_positions(
        image_places(batch.input_ids_T.numpy(), IMAGE, counts),
        batch.position_ids_T.numpy(),
        batch.lengths,
        batch.images.tensors["image_grid_thw"].numpy(),
        counts,
        read_vision(model.config.to_dict()).merge_size,
    )
    wanted = [
        model.get_rope_index(
            one[None],
            mm_token_type_ids=(one == IMAGE).int()[None],
            image_grid_thw=its and its.tensors["image_grid_thw"],
        )[0][:, 0]
        for one, its in zip(ids, images, strict=True)
    ]
    assert np.array_equal(found.T, torch.cat(wanted, dim=1).numpy())


def test_images_that_do_not_belong_to_their_tokens_are_refused():
    ids, _, [images] = image_documents("qwen2_5_vl", [2])
    tokens, grids = ids[0].numpy(), images.tensors["image_grid_thw"].numpy()
    counts = images.token_counts
    with pytest.raises(StageError, match=r"image tokens \(id 5\), and its 2 images have 9 feat"):
        image_places(tokens, IMAGE, (2, 7))
    places, alone = image_places(tokens, IMAGE, counts), np.arange(len(tokens))
    with pytest.raises(StageError, match="an image of 1 x 3 x 2 features has 2 tokens"):
        mrope_positions(places, alone, [len(tokens)], grids[::-1], counts, 2)
    cut = [int(places[4]), len(tokens) - int(places[4])]
    with pytest.raises(StageError, match="has 6 tokens over 6 places"):
        mrope_positions(places, alone, cut, grids, counts, 2)


def test_other_types_are_refused_with_those_that_take_images():
    assert VISION_TYPES.keys() | WHY_NOT.keys() == MULTIMODAL.keys()
    with pytest.raises(CapabilityError, match="gemma4 are trained on text alone: its vision"):
        read_vision({"model_type": "gemma4"})
    with pytest.raises(CapabilityError, match="llama are not multimodal"):
        read_vision({"model_type": "llama"})


@pytest.mark.parametrize("model_type", VISION_TYPES)
def test_fields_that_a_config_leaves_out_have_the_defaults_of_transformers(model_type):
    full = transformers.AutoConfig.for_model(model_type)
    bare, complete = read_vision({"model_type": model_type}), read_vision(full.to_dict())
    assert (bare.image_token_id, bare.merge_size) == (complete.image_token_id, complete.merge_size)
    assert bare.image_token_id == full.image_token_id
    assert (bare.video_token_id, bare.tokens_per_second) == (
        complete.video_token_id,
        complete.tokens_per_second,
    )
    if bare.video_token_id is not None:
        assert bare.video_token_id == full.video_token_id
    assert (bare.rope_axes, bare.num_deepstack) == (complete.rope_axes, complete.num_deepstack)


@pytest.mark.parametrize("text_type", ["granite", "gemma"])
def test_features_are_scaled_where_the_text_model_scales_all_of_its_inputs(monkeypatch, text_type):
    text = {**TEXT, "model_type": text_type, "embedding_multiplier": 3.0, "head_dim": 8}
    monkeypatch.setitem(CONFIGS, "llava", {**CONFIGS["llava"], "text_config": text})
    both = image_twins("llava")
    assert both.ours.config.embedding_scale > 1
    ids, labels, images = image_documents("llava", [1])
    wanted = their_logits(both.theirs, ids[0], images[0])
    found = both.run(micro_batch(ids, labels, images))
    assert (found - wanted).norm() <= 1e-5 * wanted.norm()


@torch.no_grad()
def test_images_alone_and_among_several_have_their_features_in_any_order():
    model = image_model("llava_onevision").model
    [alone, several] = random_images("llava_onevision", [1, 3])
    wanted = [
        model.get_image_features(**{**one.tensors, "batch_num_images": torch.tensor([len(one)])})
        for one in (several, alone)
    ]
    features = [feature for one in wanted for feature in one.pooler_output]
    both = joined([several, alone])
    assert both is not None
    order = [0, 3, 1, 2]  # one of several between others, as truncation or sharing leaves it
    tensors = {name: one[order] for name, one in both.tensors.items()}
    found = model.get_image_features(**with_each_counted(tensors)).pooler_output
    for at, feature in zip(order, found, strict=True):
        assert torch.allclose(feature, features[at], rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_a_padded_batch_of_samples_with_one_and_several_images_has_the_logits_of_each_alone():
    model = image_model("llava_onevision")
    ids, _, images = image_documents("llava_onevision", [3, 1, 0])
    length = max(map(len, ids))
    ids_BL = torch.stack([nn.functional.pad(one, (0, length - len(one))) for one in ids])
    here_BL = torch.arange(length) < torch.tensor([[len(one)] for one in ids])
    both = joined([*images])
    assert both is not None
    inputs = media_inputs(model, ids_BL, here_BL, {"image": IMAGE}, both.tensors)
    found = model(input_ids=ids_BL, use_cache=False, **inputs).logits
    for logits, one, its in zip(found, ids, images, strict=True):
        wanted = their_logits(model, one, its)
        assert (logits[: len(wanted)] - wanted).norm() <= 1e-5 * wanted.norm()
