"""`penstock models compose`: a vision tower before a text model, judged by transformers."""

from typing import Any

import pytest
import torch
import transformers

from penstock.compose.build import choose_form, compose_folders
from penstock.compose.llava import TOWERS
from penstock.compose.parts import Encoder, TextModel
from penstock.config.schema.model import Projector
from penstock.core.errors import CapabilityError, ConfigError
from penstock.core.files import write_json
from tests.cli.command import penstock
from tests.engine.runs import write_model
from tests.media.tiny_processors import NORMAL, write_tokenizer
from tests.pipeline.runs import write_run
from tests.stages.prepare.media.test_images import asking, expected, loaded, write_data

VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
ENCODERS = {
    "clip": {"vision_config": {**VISION, "projection_dim": 8}, "text_config": {"hidden_size": 8}},
    "siglip_vision_model": VISION,
    "dinov2": {name: value for name, value in VISION.items() if name != "intermediate_size"},
}
TEMPLATE = (
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)


def write_encoder(folder, model_type):
    text = {"num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    values = dict(ENCODERS[model_type])
    if "text_config" in values:
        values["text_config"] = {**values["text_config"], **text, "vocab_size": 20}
    config = transformers.AutoConfig.for_model(model_type, **values)
    torch.manual_seed(1)
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    size = {"height": 28, "width": 28}
    how = {**NORMAL, "do_center_crop": True, "crop_size": size, "size": {"shortest_edge": 28}}
    kind = {"image_processor_type": "CLIPImageProcessor"}
    write_json(folder / "preprocessor_config.json", how | kind)
    return folder


def write_text(folder, **changes):
    write_model(folder, **changes)
    write_tokenizer(folder, [], {}, bos=None)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def compose(
    text, encoder, out, *, scratch=False, projector: Projector = "mlp", scale_factor=2, seed=0
):
    tower = Encoder(str(encoder), None if scratch else encoder)
    form = choose_form(projector, scale_factor)
    return compose_folders(TextModel.of_folder(text), tower, out, form, seed=seed)


def rows(model) -> torch.Tensor:
    """The embedding's."""
    return model.get_input_embeddings().weight


def loaded_model(folder):
    return transformers.LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize(
    "model_type",
    ["clip", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in [*ENCODERS][1:])],
)
def test_its_parts_compute_what_they_did_and_new_tokens_have_rows(tmp_path, model_type):
    text = write_text(tmp_path / "text", vocab_size=258, tie_word_embeddings=False)
    encoder = write_encoder(tmp_path / "encoder", model_type)
    facts = compose(text, encoder, tmp_path / "whole", seed=3)
    whole: Any = loaded_model(tmp_path / "whole")
    assert facts["parameters"] == sum(one.numel() for one in whole.parameters())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(text, dtype=torch.float32)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(whole(input_ids=ids).logits[..., :258], theirs(input_ids=ids).logits)
    assert facts["image_token_id"] == 258
    assert len(rows(whole)) == 259
    mean = rows(theirs).mean(0)
    assert torch.allclose(rows(whole)[258], mean, atol=1e-7)
    tower: Any = transformers.AutoModel.from_pretrained(encoder, dtype=torch.float32)
    tower = getattr(tower, "vision_model", tower)
    pixels = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        [first, second] = whole.get_image_features(pixels).pooler_output
        states = tower(pixels, output_hidden_states=True).hidden_states[-2]
        states = states if "siglip" in model_type else states[:, 1:]
        wanted = whole.model.multi_modal_projector(states)
    assert first.shape == (4, 32)
    assert torch.allclose(torch.stack((first, second)), wanted, atol=1e-6)


@pytest.mark.exhaustive
def test_random_weights_are_of_the_seed(tmp_path):
    text = write_text(tmp_path / "text")
    encoder = write_encoder(tmp_path / "encoder", "clip")

    def made(name, **how):
        compose(text, encoder, tmp_path / name, **how)
        return loaded_model(tmp_path / name).state_dict()

    first, again, other = made("a", seed=1), made("b", seed=1), made("c", seed=2)
    scratch = made("d", seed=1, scratch=True)
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        is_drawn = "projector" in name and name.endswith("weight")
        assert torch.equal(tensor, other[name]) is not is_drawn
        if "vision_tower" in name and name.endswith("q_proj.weight"):
            assert not torch.equal(tensor, scratch[name])
        if "language_model" in name:
            assert torch.equal(tensor, scratch[name])


def test_a_linear_projector_is_linear_and_begins_as_one_layer(tmp_path):
    text = write_text(tmp_path / "text")
    encoder = write_encoder(tmp_path / "encoder", "siglip_vision_model")
    compose(text, encoder, tmp_path / "whole", projector="linear")
    projector = loaded_model(tmp_path / "whole").model.multi_modal_projector
    features = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(projector(features), features @ projector.linear_1.weight.T)
        projector.linear_2.weight.normal_()
        halves = projector(features) + projector(-features)
    assert torch.allclose(halves, torch.zeros(5, 32), atol=1e-5)


@pytest.mark.dist
@pytest.mark.exhaustive
def test_its_projector_is_trained_alone_on_images(tmp_path):
    text = write_text(tmp_path / "text")
    encoder = write_encoder(tmp_path / "encoder", "siglip_vision_model")
    words = ("models", "compose", text, "--image", encoder, "-o", tmp_path / "whole", "--json")
    said = penstock(*words)
    assert said.code == 0, said.err
    conversations = [asking(f"{n % 6}.jpg", answer=f"The picture {n}.") for n in range(8)]
    data = write_data(tmp_path / "data", [*conversations, asking()])
    whole = tmp_path / "whole"
    sections = {
        "model": {
            "model_path": str(whole),
            "config_path": None,
            "foundation": {},
            "freeze": ["vision", "language"],
        },
        "data": {
            "datasets": [{"path": str(data), "type": "chat"}],
            "sample_packing_sequence_len": 128,
            "val_set_size": 0,
        },
        "train": {"global_batch_size": 2, "num_train_epochs": 1},
    }
    said = penstock("run", write_run(tmp_path, **sections), "--json")
    assert said.code == 0, said.err
    [exported] = (tmp_path / "artifacts/export").glob("*/hf")
    was, now = (loaded_model(folder).state_dict() for folder in (whole, exported))
    for name, tensor in was.items():
        assert torch.equal(tensor, now[name]) is ("projector" not in name), name
    inputs = expected(exported, asking("1.jpg"))["input_ids"]
    assert (inputs == loaded(exported).token_id).sum() == 4


def test_what_cannot_be_composed_is_refused(tmp_path):
    text = write_text(tmp_path / "text")
    encoder = write_encoder(tmp_path / "encoder", "siglip_vision_model")
    granite = {"model_type": "granite", "architectures": ["GraniteForCausalLM"]}
    scaled = write_text(tmp_path / "scaled", **granite, logits_scaling=4.0)
    for folder, (first, second), why in (
        ("s", (scaled, encoder), "scales or caps its logits"),
        ("a", (text, text), "a vision tower is one of: clip, clip_vision_model, dinov2"),
        ("b", (encoder, encoder), "are not trained behind a vision tower"),
    ):
        with pytest.raises(CapabilityError, match=why):
            compose(first, second, tmp_path / folder)
        assert not (tmp_path / folder).exists()
    (encoder / "preprocessor_config.json").unlink()
    with pytest.raises(CapabilityError, match=r"has no preprocessor_config.json"):
        compose(text, encoder, tmp_path / "c")
    with pytest.raises(ConfigError, match="exists already"):
        compose(text, encoder, encoder)
    assert TOWERS.keys() >= ENCODERS.keys()
