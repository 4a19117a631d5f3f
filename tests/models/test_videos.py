"""Models with videos, judged by transformers: their positions, logits, losses and gradients."""

import numpy as np
import pytest
import torch
from torch import nn

from penstock.core.errors import CapabilityError
from penstock.engine.vision.image_inputs import require_videos
from penstock.engine.vision.image_text import ImageTextInputs
from penstock.losses.cross_entropy import Loss, LossOptions, sum_cross_entropy
from penstock.models.automodel.outline import MediaTraits
from penstock.models.vision.features import SECONDS
from penstock.models.vision.types import VISION, read_vision
from tests.models.images import image_twins
from tests.models.twins import assert_gradients_equal, gradients
from tests.models.videos import TYPES, their_inputs, their_logits, video_batch, video_documents

MEDIA = {
    "a video": (("video",),),
    "videos and images, packed": (("video", "image"), (), ("image", "video", "video")),
}
OFTEN = ("qwen2_5_vl", "qwen3_vl")


def marked(names):
    return [
        pytest.param(name, marks=() if name in OFTEN else pytest.mark.exhaustive) for name in names
    ]


@pytest.mark.parametrize("media", MEDIA.values(), ids=MEDIA.keys())
@pytest.mark.parametrize("model_type", marked(TYPES))
def test_logits_and_every_gradient_on_videos_are_those_of_transformers(model_type, media):
    both = image_twins(model_type)
    documents = video_documents(model_type, media)
    wanted = torch.cat([their_logits(both.theirs, one) for one in documents])
    batch = video_batch(documents)
    found = both.run(batch)
    assert (found - wanted).norm() <= 1e-5 * wanted.norm()
    theirs = nn.functional.cross_entropy(wanted, batch.labels_T, reduction="sum")
    theirs.backward()

    def loss(hidden, head):
        return sum_cross_entropy(hidden, head, batch.labels_T, Loss(LossOptions(), chunk=11))

    ours = both.run(batch, loss)
    ours.backward()
    assert torch.allclose(ours, theirs, rtol=1e-5)
    expected, got = both.stored_gradients(), gradients(both.ours)
    assert any(name.startswith(VISION) for name in expected)
    assert got.keys() == expected.keys()
    assert_gradients_equal(got, expected)
    for document in documents:
        own = their_logits(both.theirs, document)
        assert (both.run(video_batch([document])) - own).norm() <= 1e-5 * own.norm()


@pytest.mark.parametrize("model_type", TYPES)
def test_positions_of_videos_are_those_of_transformers(model_type):
    both = image_twins(model_type)
    documents = video_documents(model_type, (("image", "video"), (), ("video", "video", "image")))
    found = both.builder.with_layout(video_batch(documents)).position_ids_T
    wanted = []
    for one in documents:
        inputs = their_inputs(one)
        grids = {name: inputs.get(name) for name in ("image_grid_thw", "video_grid_thw")}
        model = both.theirs.model
        more = {SECONDS: inputs.get(SECONDS)} if model_type == "qwen2_5_vl" else {}
        types = inputs["mm_token_type_ids"]
        wanted.append(model.get_rope_index(one.ids[None], types, **grids, **more)[0][:, 0])
    assert np.array_equal(found.numpy().T, torch.cat(wanted, dim=1).numpy())


def test_a_video_that_two_documents_have_is_computed_once():
    both = image_twins("qwen2_5_vl")
    [one] = video_documents("qwen2_5_vl", [("video", "image")])
    batch = video_batch([one, one])
    assert batch.images is not None
    assert batch.images.tensors[SECONDS].tolist() == pytest.approx([0.3])
    assert batch.images.number_of_each(SECONDS, 0.0) == pytest.approx([0.3, 0, 0.3, 0])
    wanted = their_logits(both.theirs, one)
    found = both.run(batch)
    assert (found - torch.cat([wanted, wanted])).norm() <= 1e-5 * found.norm()


def test_models_that_are_not_trained_on_videos_are_refused_with_those_that_are():
    with pytest.raises(CapabilityError, match=r"llava are not trained(.|\n)*qwen2_vl, qwen2_5_vl"):
        require_videos(read_vision({"model_type": "llava"}))


def test_models_of_the_transformers_backend_refuse_videos():
    batch = video_batch(video_documents("qwen2_5_vl", [("video",)]))
    inputs = ImageTextInputs(MediaTraits({"image": 5}))
    with pytest.raises(CapabilityError, match=r"model\.backend: native"):
        inputs.build(batch, lambda one: one, torch.device("cpu"))
