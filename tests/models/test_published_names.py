"""Names of tensors in published checkpoints whose names transformers does not save."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from penstock.engine.hf.base_model import BaseModelWeights
from penstock.engine.hf.safetensors_reader import SafetensorsFolder
from penstock.engine.hf.unused_tensors import describe_unused
from penstock.engine.hf.weight_files import require_weights
from penstock.models.multimodal import MULTIMODAL, is_language, text_name
from penstock.models.registry import get_family
from tests.models.multimodal import multimodal_model
from tests.models.stored import to_hf
from tests.models.twins import (
    FAMILIES,
    HYBRID,
    SPARSE,
    VARIANTS,
    as_stored,
    documents,
    hf_model,
    ours_with,
    their_logits,
)

MLP = {f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
OLMO_LINEAR = {
    *MLP,
    *(f"linear_attn.{part}_proj.weight" for part in "qkvgabo"),
    *(f"linear_attn.{part}_conv1d.weight" for part in "qkv"),
    "linear_attn.A_log",
    "linear_attn.dt_bias",
    "linear_attn.o_norm.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
}
OLMO_FULL = {
    *MLP,
    *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "post_attention_layernorm.weight",
    "post_feedforward_layernorm.weight",
}
KIMI_NORMS = {"input_layernorm.weight", "post_attention_layernorm.weight"}
KIMI_LINEAR = {
    *KIMI_NORMS,
    *(f"self_attn.{part}_proj.weight" for part in (*"qkvbo", "f_a", "f_b", "g_a", "g_b")),
    *(f"self_attn.{part}_conv1d.weight" for part in "qkv"),
    "self_attn.A_log",
    "self_attn.dt_bias",
    "self_attn.o_norm.weight",
}
KIMI_LATENT = {
    *KIMI_NORMS,
    *(f"self_attn.{part}_proj.weight" for part in ("q", "kv_b", "o")),
    "self_attn.kv_a_proj_with_mqa.weight",
    "self_attn.kv_a_layernorm.weight",
}
KIMI_EXPERTS = {
    "block_sparse_moe.gate.weight",
    "block_sparse_moe.gate.e_score_correction_bias",
    *(f"block_sparse_moe.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")),
    *(f"block_sparse_moe.experts.{at}.w{one}.weight" for at in range(8) for one in (1, 2, 3)),
}
PUBLISHED = {
    "olmo_hybrid": (OLMO_LINEAR, OLMO_FULL, OLMO_LINEAR),
    "kimi_linear": (KIMI_LINEAR | MLP, KIMI_LATENT | KIMI_EXPERTS, KIMI_LINEAR | KIMI_EXPERTS),
}
"""Those of allenai/Olmo-Hybrid-7B, and those of the modules that moonshotai/Kimi-Linear-48B-A3B
brings, by layer."""


def saved(family, folder, rename: Callable[[str], str] = str):
    """Transformers' model, ours, and a folder of its weights by the names of the map."""
    theirs = hf_model(family, tied=False, attention_bias=False)
    pair = ours_with(theirs, merge_qkv=True)
    tensors = {}
    for name, tensor in pair.ours.state_dict().items():
        tensors |= to_hf(pair.weights, name, tensor)
    theirs.config.save_pretrained(folder)
    stored = {rename(name): tensor.contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return pair, tensors


@pytest.mark.parametrize("family", PUBLISHED)
def test_files_of_published_names_are_complete_in_transformers_and_give_the_same_logits(
    family, tmp_path
):
    pair, tensors = saved(family, tmp_path)
    for number, names in enumerate(PUBLISHED[family]):
        at = f"model.layers.{number}."
        assert {name.removeprefix(at) for name in tensors if name.startswith(at)} == names
    rest = {name for name in tensors if ".layers." not in name}
    assert rest == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    found: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    loaded, report = found
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for document in documents()[0]:
        torch.testing.assert_close(
            their_logits(loaded.eval(), document), their_logits(pair.theirs, document)
        )


def test_norms_of_olmo_hybrid_are_read_by_their_earlier_names_too(tmp_path):
    def earlier(name):
        if ".0." not in name and ".2." not in name:
            return name
        name = name.replace("input_layernorm", "attention_layer_norm")
        return name.replace("post_attention_layernorm", "feedforward_layer_norm")

    pair, tensors = saved("olmo_hybrid", tmp_path, earlier)
    hf_config = pair.theirs.config.to_dict()
    names = pair.weights.config.names
    require_weights(tmp_path, pair.weights, len(PUBLISHED["olmo_hybrid"]), names.today)
    base = BaseModelWeights(pair.weights, None, hf_config, get_family(hf_config).roles, tmp_path)
    with SafetensorsFolder(tmp_path) as folder:
        assert "model.layers.0.attention_layer_norm.weight" in folder.names()
        reader = base.quantized_reader(folder)
        for name, tensor in tensors.items():
            assert torch.equal(reader.box(name, (0,) * tensor.ndim, tensor.shape), tensor), name


def assert_read(folder, weights, num_layers, wanted, rename):
    """The check accepts the folder, and every tensor, and a box of it, is read as it is wanted."""
    require_weights(folder, weights, num_layers, rename)
    hf_config = json.loads((folder / "config.json").read_text())
    assert describe_unused(folder, hf_config, weights) is None
    base = BaseModelWeights(weights, None, hf_config, get_family(hf_config).roles, folder)
    with SafetensorsFolder(folder) as opened:
        reader = base.quantized_reader(opened)
        for name, tensor in wanted.items():
            assert torch.equal(reader.box(name, (0,) * tensor.ndim, tensor.shape), tensor), name
            start, rows = len(tensor) // 3, len(tensor) // 2
            rest = (0,) * (tensor.ndim - 1), tensor.shape[1:]
            box = reader.box(name, (start, *rest[0]), (rows, *rest[1]))
            assert torch.equal(box, tensor[start : start + rows]), name


@pytest.mark.parametrize("family", sorted({**FAMILIES, **SPARSE, **HYBRID, **VARIANTS}))
def test_a_folder_that_transformers_saves_is_complete_and_read_as_it_computes(family, tmp_path):
    theirs = hf_model(family, tied=False)
    pair = ours_with(theirs, merge_qkv=True)
    theirs.save_pretrained(tmp_path)
    wanted = {}
    for native, tensor in pair.ours.state_dict().items():
        wanted |= to_hf(pair.weights, native, tensor)
    names = pair.weights.config.names
    assert_read(tmp_path, pair.weights, theirs.config.num_hidden_layers, wanted, names.today)


@pytest.mark.parametrize("model_type", MULTIMODAL)
def test_a_language_model_that_transformers_saves_in_a_multimodal_one_is_read(model_type, tmp_path):
    theirs = multimodal_model(model_type)
    theirs.save_pretrained(tmp_path)
    hf_config = json.loads((tmp_path / "config.json").read_text())
    family = get_family(hf_config)
    config = family.read(hf_config)
    stored = as_stored(theirs, theirs.state_dict())
    named = {text_name(name): tensor for name, tensor in stored.items() if is_language(name)}
    weights = family.weight_map(config, merge_qkv=True)
    wanted = {name: named[name] for name in weights.hf_shapes()}
    assert_read(tmp_path, weights, config.num_hidden_layers, wanted, text_name)
