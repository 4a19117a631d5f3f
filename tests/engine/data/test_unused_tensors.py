"""Tensors of a base model's files are used or named; tied weights with other values are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from penstock.core.errors import CapabilityError
from penstock.estimate.machine import check_model
from tests.engine import runs

BIAS = "model.layers.0.self_attn.q_proj.bias"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def notes(folder: Path, **foundation: Any) -> tuple[str, ...]:
    model = {"model_path": str(folder), "foundation": foundation}
    return check_model(runs.run_config(folder.parent / "out", folder, model=model))


def with_tensors(folder: Path, further: dict[str, torch.Tensor]) -> Path:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **further}, file, {"format": "pt"})
    return folder


def unexpected(folder: Path) -> set[str]:
    """What transformers finds no parameter for."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    return set(loaded[1]["unexpected_keys"])


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return runs.write_model(tmp_path / "base")


def test_what_transformers_reports_as_unexpected_is_named(base: Path) -> None:
    assert notes(base) == ()
    extra = {BIAS: torch.ones(32), "model.layers.1.mlp.scale": torch.ones(4)}
    computed = {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    with_tensors(base, {**extra, **computed})
    (line,) = notes(base)
    assert "2 tensors are" in line
    assert all(name in line for name in extra)
    assert unexpected(base) == set(extra)


def test_tensors_that_an_index_leaves_out_are_named_too(base: Path) -> None:
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(base, max_shard_size="20KB")
    (base / "model.safetensors").unlink(missing_ok=True)
    index = json.loads((base / "model.safetensors.index.json").read_text())
    shard = base / index["weight_map"]["model.norm.weight"]
    assert notes(base) == ()
    save_file({**load_file(shard), BIAS: torch.ones(32)}, shard, {"format": "pt"})
    assert unexpected(base) == {BIAS}
    assert BIAS in notes(base)[0]


def test_a_copy_of_tied_weights_is_used_and_other_values_are_refused(base: Path) -> None:
    table = load_file(base / "model.safetensors")[EMBEDDING]
    with_tensors(base, {HEAD: table.clone()})
    assert notes(base) == ()
    with_tensors(base, {HEAD: table + 1})
    untied: Any = AutoModelForCausalLM.from_pretrained(base)
    assert torch.equal(untied.lm_head.weight, table + 1), "transformers does not tie them"
    with pytest.raises(CapabilityError, match=r"lm_head\.weight has other values"):
        notes(base)
    assert notes(base, tie_word_embeddings=False) == ()


@pytest.mark.slow
def test_models_of_the_transformers_backend_are_checked_in_the_same_way(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=320, n_embd=32, n_layer=2, n_head=2, n_positions=512)
    base = tmp_path / "base"
    GPT2LMHeadModel(config).save_pretrained(base)
    table = load_file(base / "model.safetensors")["transformer.wte.weight"]
    with_tensors(base, {HEAD: table.clone()})
    assert notes(base) == ()
    with_tensors(base, {HEAD: table.clone(), "transformer.h.0.attn.rotary": torch.ones(2)})
    assert unexpected(base) == {"transformer.h.0.attn.rotary"}
    assert "transformer.h.0.attn.rotary" in notes(base)[0]
    with_tensors(base, {HEAD: table + 1})
    with pytest.raises(CapabilityError, match=r"lm_head\.weight has other values"):
        notes(base)
