"""Experts in the forms of published files, which differ from those that transformers writes."""

import pytest
import torch
from safetensors.torch import save_file

from penstock.engine.hf.base_model import BaseModelWeights
from penstock.engine.hf.safetensors_reader import SafetensorsFolder
from penstock.engine.hf.state_dict import in_multimodal, in_source
from penstock.engine.hf.stored_forms import in_files_form, parts_in
from penstock.models.multimodal import is_language, text_name
from penstock.models.registry import get_family
from tests.models.multimodal import multimodal_model
from tests.models.stored import published
from tests.models.twins import as_stored


def write_published(model, folder):
    """Write the weights as they are on the hub: of a Qwen with the experts of a layer in one
    tensor, and of ERNIE as transformers writes them."""
    if model.config.model_type == "ernie4_5_vl_moe":
        return model.save_pretrained(folder)
    is_transposed = model.config.model_type == "qwen3_vl_moe"
    tensors = published(model, model.state_dict())
    found = {name: one for name, one in tensors.items() if ".mlp.experts." not in name}
    for name, one in model.state_dict().items():
        if ".mlp.experts." in name:
            found[name] = one.mT if is_transposed else one
    if model.config.tie_word_embeddings:
        del found["lm_head.weight"]
    contiguous = {name: one.contiguous() for name, one in found.items()}
    return save_file(contiguous, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("model_type", ["ernie4_5_vl_moe", "qwen3_5_moe", "qwen3_vl_moe"])
def test_experts_as_files_have_them_are_read_and_written_back(tmp_path, model_type):
    model = multimodal_model(model_type)
    write_published(model, tmp_path)
    hf_config = model.config.to_dict()
    family = get_family(hf_config, "native")
    names = family.weight_map(family.read(hf_config))
    base = BaseModelWeights(names, None, hf_config, family.roles, tmp_path)
    stored = as_stored(model, model.state_dict())
    wanted = {text_name(name): one for name, one in stored.items() if is_language(name)}
    with SafetensorsFolder(tmp_path) as folder:
        reader = base.quantized_reader(folder)
        weights = in_source(reader, names)
        for name, shape in weights.shapes.items():
            assert reader.stored(name).shape == shape
            assert torch.equal(weights.read([name])[name], wanted[name])
            box = [slice(size // 3, size - size // 4) for size in shape]
            offsets, sizes = zip(*((one.start, one.stop - one.start) for one in box), strict=True)
            assert torch.equal(reader.box(name, offsets, sizes), wanted[name][tuple(box)])
        here = base.here(folder)
        parts = parts_in(names, here)
        assert parts
        whole = in_multimodal(in_files_form(weights, here, parts), folder, {})
        assert whole.shapes.keys() == {*folder.names()}
        for name in whole.shapes:
            assert torch.equal(whole.read([name])[name], folder[name])
