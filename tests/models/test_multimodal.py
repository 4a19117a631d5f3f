"""The language models in multimodal ones, judged by transformers on text."""

import pytest
import torch
import transformers

from penstock.core.errors import ConfigError
from penstock.engine.distributed.validate_layout import ModelDims
from penstock.models.decoder import Decoder
from penstock.models.foundation import apply_overrides, check_foundation
from penstock.models.multimodal import (
    MULTIMODAL,
    TEXT_DEFAULTS,
    is_language,
    stored_backbone,
    stored_name,
    text_name,
)
from penstock.models.registry import get_family
from tests.models.multimodal import multimodal_model
from tests.models.stored import from_hf
from tests.models.twins import NEEDED, as_stored, documents, packed_logits, their_logits


@pytest.mark.parametrize("model_type", MULTIMODAL)
def test_logits_on_text_and_all_names_are_those_of_transformers(model_type):
    theirs = multimodal_model(model_type)
    hf_config = theirs.config.to_dict()
    family = get_family(hf_config, "native")
    assert (family.model_type, family.architecture) == (model_type, type(theirs).__name__)
    config = family.read(hf_config)
    weights = family.weight_map(config, merge_qkv=True)
    stored = as_stored(theirs, theirs.state_dict())
    named = {text_name(name): tensor for name, tensor in stored.items() if is_language(name)}
    ours = Decoder(config, merge_qkv=True)
    ours.load_state_dict(
        {name: from_hf(weights, name, named.__getitem__) for name in weights.native_names()}
    )
    ids = documents([7, 20])[0]
    with torch.no_grad():
        wanted = torch.cat([their_logits(theirs, document) for document in ids])
        assert (packed_logits(ours, ids) - wanted).norm() <= 1e-5 * wanted.norm()
    # To files and to modules of the whole model, and back.
    backbone = stored_backbone(stored)
    for name in weights.hf_shapes():
        assert stored_name(name, backbone) in stored
        assert text_name(stored_name(name, backbone)) == name
        module = stored_name(name, family.multimodal)
        # The class has the experts of a layer in one parameter.
        assert ".experts." in name or module in theirs.state_dict()
        assert text_name(module) == name
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    assert named.keys() - tied == weights.hf_shapes().keys()


def test_overrides_of_the_language_model_are_those_of_its_own_table():
    hf_config = multimodal_model("qwen3_vl").config.to_dict()
    entries = {"text_config": {"num_hidden_layers": 1}}
    check_foundation(hf_config, entries)
    assert ModelDims.of(apply_overrides(hf_config, entries)).num_hidden_layers == 1
    for wrong in ({"num_hidden_layers": 1}, {"text_config": {"num_layers": 1}}):
        with pytest.raises(ConfigError, match=r"has no effect: models of the type qwen3_vl"):
            check_foundation(hf_config, wrong)


@pytest.mark.parametrize("text_type", TEXT_DEFAULTS)
def test_fields_that_a_text_config_leaves_out_have_the_defaults_of_transformers(text_type):
    model_type = text_type.removesuffix("_text")
    model_type = model_type if model_type in MULTIMODAL else "llava"
    needed = NEEDED.get(text_type, {})
    full = transformers.AutoConfig.for_model(text_type, **needed).to_dict()
    configs = [
        {"model_type": model_type, "text_config": text, "tie_word_embeddings": False}
        for text in ({"model_type": text_type, **needed}, full)
    ]
    bare, complete = (get_family(config, "native").read(config) for config in configs)
    assert bare == complete
