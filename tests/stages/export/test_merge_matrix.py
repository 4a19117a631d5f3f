"""`penstock merge` computes what peft's adapted model computes, for kinds of adapters by kinds of
models, with tied and resized embeddings; or it refuses before it writes."""

import itertools
import json
import warnings
from typing import Any

import pytest
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    get_peft_model,
)
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from penstock.core.errors import CapabilityError
from penstock.export.merge import merge_folders

DECODER: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
LLAMA: dict[str, Any] = DECODER | {
    "intermediate_size": 48,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
GPT2: dict[str, Any] = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 32,
}
MIXTURE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
MODELS = {
    # Config, its values; an attention layer, the embedding and the head in transformers' model.
    "qwen3": (Qwen3Config, LLAMA | {"attention_bias": True}, "q_proj", "embed_tokens", "lm_head"),
    "llama": (LlamaConfig, LLAMA | {"attention_bias": True}, "q_proj", "embed_tokens", "lm_head"),
    "qwen3_moe": (
        Qwen3MoeConfig,
        LLAMA | MIXTURE | {"attention_bias": True},
        "q_proj",
        "embed_tokens",
        "lm_head",
    ),
    "gemma": (GemmaConfig, LLAMA, "q_proj", "embed_tokens", "lm_head"),
    "gpt2": (GPT2Config, GPT2, "c_attn", "wte", "lm_head"),
    "gpt_neox": (
        GPTNeoXConfig,
        DECODER | {"intermediate_size": 48},
        "query_key_value",
        "embed_in",
        "lm_head",
    ),
    "opt": (
        OPTConfig,
        DECODER | {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 32},
        "q_proj",
        "embed_tokens",
        "lm_head",
    ),
}
KINDS = {
    "lora": lambda layer, *_: {"target_modules": [layer]},
    "rslora": lambda layer, *_: {"target_modules": [layer], "use_rslora": True},
    "dora": lambda layer, *_: {"target_modules": [layer], "use_dora": True},
    "biases": lambda layer, *_: {"target_modules": [layer], "bias": "all", "lora_bias": True},
    "embedding": lambda layer, embedding, _: {"target_modules": [layer, embedding]},
    "embedding, dora": lambda _, embedding, __: {"target_modules": [embedding], "use_dora": True},
    "head": lambda layer, _, head: {"target_modules": [layer, head]},
    "both": lambda _, embedding, head: {"target_modules": [embedding, head]},
    "saved embedding": lambda layer, embedding, _: {
        "target_modules": [layer],
        "modules_to_save": [embedding],
    },
    "saved head": lambda layer, _, head: {"target_modules": [layer], "modules_to_save": [head]},
    "saved both": lambda layer, embedding, head: {
        "target_modules": [layer],
        "modules_to_save": [embedding, head],
    },
    "tied embedding": lambda _, embedding, __: {
        "target_modules": [embedding],
        "ensure_weight_tying": True,
    },
    "tied dora": lambda _, embedding, __: {
        "target_modules": [embedding],
        "ensure_weight_tying": True,
        "use_dora": True,
    },
    "tied saved": lambda layer, embedding, _: {
        "target_modules": [layer],
        "modules_to_save": [embedding],
        "ensure_weight_tying": True,
    },
}
KINDS["experts"] = lambda layer, *_: {
    "target_modules": [layer],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
CASES = [
    case
    for case in itertools.product(
        MODELS, KINDS, ("tied", "untied"), ("", "resized"), ("as needed", "whole embeddings")
    )
    if case[1] != "experts" or case[0] == "qwen3_moe"
]
DRAWN = {
    *CASES[::29],
    ("qwen3", "embedding", "tied", "", "as needed"),
    ("gpt2", "saved embedding", "tied", "resized", "as needed"),
    ("gpt_neox", "saved both", "untied", "resized", "as needed"),
    ("qwen3_moe", "experts", "untied", "", "as needed"),
}


def _model(name, tied):
    kind, values, *_ = MODELS[name]
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(kind(**values, tie_word_embeddings=tied == "tied"))


def _saved(name, kind, tied, resized, saves, folder):
    """Saves a model and an adapter of it; returns the adapted model's logits."""
    model = _model(name, tied)
    model.save_pretrained(folder / "base", max_shard_size="20KB")
    if resized:
        model.resize_token_embeddings(70, mean_resizing=False)
    config = KINDS[kind](*MODELS[name][2:])
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, **config)).eval()
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    adapted.save_pretrained(
        folder / "adapter",
        save_embedding_layers=True if resized or saves == "whole embeddings" else "auto",
    )
    return adapted(torch.arange(12).view(1, -1)).logits


def _is_incomplete(name, kind, tied, resized):
    """Whether peft cannot merge it, or leaves out embeddings that were resized: of a model whose
    embeddings have the names that it knows, it saves those alone that are adapted."""
    if kind == "biases":
        return name == "gemma"
    _, _, _, embedding, head = MODELS[name]
    adapted = {*KINDS[kind](*MODELS[name][2:])["target_modules"]}
    is_known = not adapted.isdisjoint({"embed_tokens", "lm_head"})
    return bool(resized and tied == "untied" and is_known and not adapted >= {embedding, head})


@pytest.mark.parametrize(
    ("name", "kind", "tied", "resized", "saves"),
    [
        pytest.param(
            *case, marks=() if case in DRAWN else pytest.mark.exhaustive, id="-".join(case)
        )
        for case in CASES
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_merged_model_computes_what_the_adapted_one_does(
    name, kind, tied, resized, saves, tmp_path
):
    theirs = _saved(name, kind, tied, resized, saves, tmp_path)
    if _is_incomplete(name, kind, tied, resized):
        with pytest.raises(CapabilityError):
            merge_folders(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return
    merge_folders(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    merged, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert merged.config.vocab_size == (70 if resized else 64)
    ours = merged.eval()(torch.arange(12).view(1, -1)).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-5)


OTHERS = {
    "IA3": IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
    "LOHA": LoHaConfig(target_modules=["q_proj"]),
    "LOKR": LoKrConfig(target_modules=["q_proj"]),
    "ADALORA": AdaLoraConfig(target_modules=["q_proj"], total_step=9),
    "trainable_token_indices": LoraConfig(
        target_modules=["q_proj"], trainable_token_indices=[1, 2]
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.filterwarnings("ignore")
def test_other_adapters_are_refused_by_name(kind, tmp_path):
    model = _model("qwen3", "tied")
    model.save_pretrained(tmp_path / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        get_peft_model(model, OTHERS[kind]).save_pretrained(tmp_path / "adapter")
    with pytest.raises(CapabilityError, match=kind):
        merge_folders(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_with_the_names_of_files_is_merged_as_one_with_those_of_modules(tmp_path):
    # GPT-NeoX's files call the head embed_out, and so do adapters that Penstock writes.
    theirs = _saved("gpt_neox", "saved head", "untied", "", "as needed", tmp_path)
    adapter = tmp_path / "adapter"
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["lm_head"]
    config["modules_to_save"] = ["embed_out"]
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(adapter / "adapter_model.safetensors")
    renamed = {name.replace("lm_head", "embed_out"): tensors[name] for name in tensors}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, adapter / "adapter_model.safetensors", {"format": "pt"})
    merge_folders(tmp_path / "base", adapter, tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ours = merged.eval()(torch.arange(12).view(1, -1)).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-5)
