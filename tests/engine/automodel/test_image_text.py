"""Image-text models that are trained through transformers' own code, with their vision part."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from penstock.core.errors import CapabilityError, ConfigError, StageError
from penstock.engine.vision.image_text import (
    ImageTextInputs,
    check_image_text,
    require_audio,
)
from penstock.export.card_text import model_snippet
from penstock.models.automodel.family import AutoFamily, auto_family
from penstock.models.automodel.media.traits import document_logits
from penstock.models.automodel.outline import AutoModelConfig, MediaTraits
from penstock.models.automodel.proved import IMAGE_FILE, ProvedModels, audio_types
from penstock.models.registry import get_family
from penstock.train.launch.job import Job
from tests.engine import loops, runs
from tests.engine.automodel import examine_images as examine
from tests.engine.automodel import tiny_images
from tests.models.twins import SIZES
from tests.ranks import on_ranks
from tests.turns import one_day_in

KIND = "qwen2_vl"
"""Grids of patches, rotary positions in three axes; all others are examined by an exhaustive
test."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("image-models")
    runs.write_rows(root / "packed", 4)
    return root


@pytest.mark.dist
@one_day_in(3, of=0)
def test_a_model_trains_on_images_resumes_and_is_exported(folder):
    assert examine.examine(folder / KIND, KIND).faults == []


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", tiny_images.IMAGE_TYPES)
def test_every_image_text_type_trains_or_has_its_reason(folder, model_type):
    reason = ProvedModels.read(IMAGE_FILE).models[model_type].reason
    if model_type in tiny_images.NOT_BUILT:
        assert reason
        return
    try:
        faults = examine.examine(folder / model_type, model_type).faults
    except Exception as error:  # noqa: BLE001 - any error is a reason
        faults = [str(error)]
    assert bool(faults) == bool(reason), faults


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", ["qwen2_audio", "voxtral", "qwen2_5_omni_thinker+audio"])
def test_types_with_audio_train_on_it_resume_and_are_exported(folder, model_type):
    assert examine.examine(folder / model_type, model_type).faults == []


@pytest.mark.parametrize(
    "model_type",
    [
        "qwen2_audio",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("voxtral", "qwen2_5_omni_thinker")
        ),
    ],
)
def test_types_with_audio_are_proved_with_it_and_their_tower_is_a_part(model_type):
    values = tiny_images.tiny_image_config(model_type).to_dict()
    outline = auto_family(values).outline
    assert outline.media
    assert "audio" in outline.media.token_ids
    parts = {outline.part(name) for name in outline.params if ".audio_tower." in name}
    assert parts == {"vision"}
    assert not any("audio" in name for name in outline.linear)


def test_what_was_proved_is_of_every_image_text_type_that_the_library_lists():
    proved = ProvedModels.read(IMAGE_FILE)
    if proved.transformers != transformers.__version__:
        pytest.skip(f"proved with transformers {proved.transformers}")
    assert sorted(proved.models) == tiny_images.IMAGE_TYPES
    assert sum(not one.reason for one in proved.models.values()) >= 60
    examined = {name.removesuffix(tiny_images.WITH_AUDIO) for name in tiny_images.AUDIO_EXAMINED}
    assert audio_types() == examined


def their_gradients(folder):
    """Loss and gradients by transformers, one document after another."""
    model = tiny_images.load(folder)
    documents = [
        one
        for numbers in (one for each in examine.NUMBERS for one in each)
        for one in tiny_images.documents_of(model, numbers)
    ]
    trained = sum(int((tiny_images.labels(model, one) != -100).sum()) for one in documents)
    total = 0.0
    for one in documents:
        wanted = tiny_images.labels(model, one)
        logits = document_logits(model, [one])[0]
        loss = nn.functional.cross_entropy(logits, wanted, reduction="sum") / trained
        loss.backward()
        total += loss.item()
    return total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


LAYOUTS = {
    "shard 2": {},
    "ddp": {
        "data_parallel_mode": "ddp",
        "data_parallel_shard_size": 1,
        "data_parallel_replicate_size": 2,
    },
    "nothing recomputed": {"enable_gradient_checkpointing": False},
}


FURTHER = ("mllama", "idefics3", "qwen2_audio", "qwen2_5_omni_thinker+audio")


def _gradients(jobs: dict[str, Job]):
    found = {}
    for name, job in jobs.items():
        loop = loops.loop_of(job)
        seen = loops.before_each_update(loop, lambda loop=loop: loops.gradients_of(loop))
        losses = examine.steps(job, range(1), loop)
        found[name] = losses[0], seen[0]
    return found


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    ["llava", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in FURTHER)],
)
def test_gradients_of_every_part_are_those_of_transformers_in_any_layout(folder, model_type):
    own = folder / f"gradients-{model_type}"
    tiny_images.write_image_model(own, model_type)
    jobs = {
        name: examine.image_job(own, name, max_grad_norm=0.0, **changes)
        for name, changes in LAYOUTS.items()
    }
    found = on_ranks(2, _gradients, jobs)[0]
    loss, wanted = their_gradients(own)
    assert any("vision" in name or "audio" in name for name in wanted)
    for tensor in tiny_images.fixed_parameters(model_type):
        wanted.pop(tensor)
    for name, (ours, gradients) in found.items():
        assert ours == pytest.approx(loss, rel=1e-5), name
        for tensor, value in wanted.items():
            error = np.linalg.norm(gradients[tensor] - value.numpy())
            least = 1e-7  # of biases of keys, which are 0 but for rounding
            assert error <= 2e-5 * np.linalg.norm(value.numpy()) + least, f"{name}: {tensor}"
        for tensor in gradients.keys() - wanted.keys():
            assert not gradients[tensor].any(), f"{name}: {tensor}"


def _moved(jobs: dict[str, Job]):
    """How far each parameter is moved by a step, and its gradient."""
    found = {}
    for name, job in jobs.items():
        loop = loops.loop_of(job)
        seen = loops.before_each_update(loop, lambda loop=loop: loops.gradients_of(loop))
        was = loops.parameters_of(loop)
        examine.steps(job, range(1), loop)
        now = loops.parameters_of(loop)
        found[name] = {tensor: now[tensor] - value for tensor, value in was.items()}, seen[0]
    return found


@pytest.mark.dist
@pytest.mark.exhaustive
def test_parts_learn_at_their_own_rates_in_any_layout(folder):
    own = folder / "rates"
    tiny_images.write_image_model(own, "llava")
    plain = {"optimizer": "sgd", "optimizer_kwargs": {}, "weight_decay": 0.0, "max_grad_norm": 0.0}
    rates = {"vision": examine.LR / 4, "projector": 2 * examine.LR, "language": examine.LR}
    lrs = {f"{part}_lr": rates[part] for part in ("vision", "projector")}
    jobs = {
        name: examine.image_job(own, f"rates-{name}", **plain, **lrs, **changes)
        for name, changes in LAYOUTS.items()
    }
    parts = {"vision_tower": "vision", "multi_modal_projector": "projector"}
    for name, (moved, gradients) in on_ranks(2, _moved, jobs)[0].items():
        seen = set()
        for tensor, gradient in gradients.items():
            part = parts.get(tensor.split(".")[1], "language")
            seen.add(part)
            step = -rates[part] * gradient
            assert np.allclose(moved[tensor], step, rtol=1e-3, atol=1e-7), f"{name}: {tensor}"
        assert seen == rates.keys()


def _dropped(jobs: list[Job]) -> list[tuple[list[float], bool]]:
    found = []
    for job in jobs:
        losses, _, resumes = examine.trained(job)
        found.append((losses, resumes))
    return found


@pytest.mark.dist
@one_day_in(3, of=1)
def test_adapters_drop_from_inputs_that_are_tokens_of_padded_documents_or_of_images(folder):
    jobs = []
    for kind in ("gemma3", "mllama"):
        tiny_images.write_image_model(folder / f"dropped-{kind}", kind)
        lora = {"enable_lora": True, "lora_rank": 4, "lora_dropout": 0.3}
        jobs.append(examine.image_job(folder / f"dropped-{kind}", "lora", lora=lora))
    for losses, resumes in on_ranks(2, _dropped, jobs)[0]:
        assert losses[-1] < losses[0]
        assert resumes


def _trained_names(jobs: dict[str, Job]):
    found = {}
    for name, job in jobs.items():
        model = loops.loop_of(job).built.engine.model
        found[name] = sorted(one.name for one in model.trainable)
    return found


@pytest.mark.dist
def test_the_parts_that_model_freeze_names_are_not_trained(folder):
    own = folder / "frozen"
    tiny_images.write_image_model(own, "llava")
    base = {"data_parallel_mode": "none", "data_parallel_shard_size": 1}
    forms = {"all": [], "default": None, "vision": ["vision"], "language": ["language"]}
    jobs = {
        name: examine.image_job(own, name, model={"freeze": parts}, **base)
        for name, parts in forms.items()
    }
    jobs["text"] = replace(jobs["default"], images=False)
    jobs["lora"] = examine.image_job(own, "lora", lora={"enable_lora": True}, **base)
    [found] = on_ranks(1, _trained_names, jobs)
    parts = {
        name: {one.split(".")[1] if one.startswith("model.") else "language_model" for one in names}
        for name, names in found.items()
    }
    assert parts == {
        "all": {"vision_tower", "multi_modal_projector", "language_model"},
        "default": {"language_model"},
        "vision": {"multi_modal_projector", "language_model"},
        "language": {"vision_tower", "multi_modal_projector"},
        "text": {"language_model"},
        "lora": {"language_model"},
    }


def test_a_type_without_a_native_text_family_is_trained_whole_by_auto():
    values = tiny_images.tiny_image_config("aya_vision").to_dict()
    family = get_family(values)
    assert isinstance(family, AutoFamily)
    assert family.outline.media
    assert any(name.startswith("model.vision_tower.") for name in family.outline.params)
    assert not any("vision" in name for name in family.outline.linear)


def test_a_model_card_loads_it_with_its_vision_part():
    assert "AutoModelForImageTextToText" in model_snippet("text", "aya_vision")
    assert "AutoModelForCausalLM" in model_snippet("text", "gpt2")


def test_an_encoder_decoder_is_refused_by_name():
    values = tiny_images.tiny_image_config("florence2").to_dict()
    with pytest.raises(CapabilityError, match="florence2 is an encoder-decoder"):
        auto_family(values)


@pytest.mark.parametrize(
    ("settings", "images", "why"),
    [
        ({"model": {"freeze": ["language"]}}, False, "model.freeze is .* no images: nothing"),
        (
            {"data": {"encode_images": True}, "model": {"freeze": ["vision"], "backend": "auto"}},
            True,
            "data.encode_images is true",
        ),
    ],
    ids=["freeze", "encode_images"],
)
def test_settings_that_an_image_text_model_cannot_honour_are_refused(folder, settings, images, why):
    values = tiny_images.tiny_image_config("llava").to_dict()
    config = auto_family(values).read(values)
    assert isinstance(config, AutoModelConfig)
    run = examine.image_job(folder, "refused", **settings).config
    with pytest.raises(ConfigError, match=why):
        check_image_text(run, values, config, images=images)


@pytest.mark.slow
def test_images_for_a_text_model_are_refused(folder):
    values = {"model_type": "gpt2", **SIZES}
    config = auto_family(values).read(values)
    assert isinstance(config, AutoModelConfig)
    run = runs.run_config(folder / "text", folder, model={"backend": "transformers"})
    with pytest.raises(CapabilityError, match="the data has images, and a gpt2 is a text model"):
        check_image_text(run, values, config, images=True)


def test_audio_for_a_model_that_is_not_trained_on_it_is_refused():
    values = tiny_images.tiny_image_config("llava").to_dict()
    config = auto_family(values).read(values)
    assert isinstance(config, AutoModelConfig)
    with pytest.raises(CapabilityError, match=r"A llava is not trained on audio\.\n  Use a model"):
        require_audio(values, config)
    media = MediaTraits({"image": 1}, {"audio": "it has no get_audio_features"})
    deaf = replace(config, outline=replace(config.outline, media=media))
    with pytest.raises(CapabilityError, match="is not trained on audio: it has no get_audio_feat"):
        require_audio(values, deaf)
    hearing = replace(media, token_ids={"image": 1, "audio": 2})
    require_audio(values, replace(config, outline=replace(config.outline, media=hearing)))


def test_images_that_do_not_belong_to_the_tokens_are_refused(folder):
    own = folder / "counted"
    tiny_images.write_image_model(own, "llava")
    model = tiny_images.load(own)
    batch = tiny_images.micro_batch(model, [1])
    builder = ImageTextInputs(MediaTraits({"image": model.config.image_token_id}))
    cpu = torch.device("cpu")
    assert builder.build(batch, lambda one: one, cpu)
    assert builder.build(replace(batch, images=None), lambda one: one, cpu) is None
    assert batch.images is not None
    fewer = replace(batch.images, token_counts=(3,))
    with pytest.raises(StageError, match="prepare it again"):
        builder.build(replace(batch, images=fewer), lambda one: one, cpu)
    sound = replace(batch.images, tensors={"input_features": torch.zeros(1, 8, 4)})
    deaf = ImageTextInputs(MediaTraits({"image": 1}, {"audio": "it has no get_audio_features"}))
    with pytest.raises(CapabilityError, match=r"has audio, .* trained on audio: it has no get_"):
        deaf.build(replace(batch, images=sound), lambda one: one, cpu)
