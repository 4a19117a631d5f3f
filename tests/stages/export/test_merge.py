"""`penstock merge` beside peft's own merging, for every kind of low-rank adapter peft writes."""

import errno
import json
import os
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from penstock.core.errors import CapabilityError, ConfigError
from penstock.export import merge_file
from penstock.export.merge import merge_folders

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
}
SQUARE: dict[str, Any] = SMALL | {"intermediate_size": 32}
QWEN = Qwen3Config(**SMALL, attention_bias=True)
GPT2 = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=32)

linear = partial(LoraConfig, r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
KINDS = {
    "plain": (QWEN, linear()),
    "rank-stabilized, by patterns": (
        QWEN,
        linear(
            use_rslora=True,
            rank_pattern={"down_proj": 2},
            alpha_pattern={r"layers\.1\.self_attn\.q_proj": 3},
        ),
    ),
    "magnitudes": (QWEN, linear(use_dora=True)),
    "biases": (QWEN, linear(bias="all", lora_bias=True, target_modules=["q_proj", "k_proj"])),
    "embedding and head": (
        QWEN,
        linear(target_modules=["embed_tokens", "q_proj"], modules_to_save=["lm_head"]),
    ),
    "an embedding's magnitudes": (QWEN, linear(target_modules=["embed_tokens"], use_dora=True)),
    "stored the other way round": (
        GPT2,
        linear(target_modules=["c_attn", "c_proj"], fan_in_fan_out=True),
    ),
    "magnitudes the other way round": (
        GPT2,
        linear(target_modules=["c_attn"], fan_in_fan_out=True, use_dora=True),
    ),
}


def _model(config):
    torch.manual_seed(1)
    return (Qwen3ForCausalLM if config is QWEN else GPT2LMHeadModel)(config)


def _adapted(config, lora):
    """The model with an adapter that has been somewhere."""
    adapted = get_peft_model(_model(config), lora)
    _moved(adapted)
    return adapted


def _moved(adapted):
    torch.manual_seed(2)
    with torch.no_grad():
        for _, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))


def _tensors(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


EXPERTS = {
    Qwen3MoeForCausalLM: Qwen3MoeConfig(
        **SMALL, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2
    ),
    MixtralForCausalLM: MixtralConfig(**SMALL, num_local_experts=4),
    GptOssForCausalLM: GptOssConfig(**SQUARE, num_local_experts=4, num_experts_per_tok=2),
    NemotronHForCausalLM: NemotronHConfig(
        **SMALL,
        layers_block_type=["moe", "full_attention"],
        n_routed_experts=4,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
    ),
}
STACKS = {NemotronHForCausalLM: ["mixer.experts.up_proj", "mixer.experts.down_proj"]}


@pytest.mark.parametrize("kind", EXPERTS, ids=lambda kind: kind.__name__)
@pytest.mark.filterwarnings("ignore")
def test_adapters_of_all_experts_at_once_merge_into_the_files_of_each(kind, tmp_path):
    torch.manual_seed(1)
    model = kind(EXPERTS[kind])
    model.save_pretrained(tmp_path / "base", max_shard_size="20KB")
    lora = LoraConfig(
        r=2,
        lora_alpha=8,
        target_modules=["q_proj"],
        target_parameters=STACKS.get(kind, ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
    )
    adapted = get_peft_model(model, lora)
    _moved(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    merge_folders(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    ids = torch.arange(12).view(1, -1)
    ours = kind.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    torch.testing.assert_close(ours(ids).logits, adapted.eval()(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_a_stack_of_experts_merged_an_expert_at_a_time_gets_the_adapter_of_each(
    tmp_path, monkeypatch
):
    torch.manual_seed(1)
    model = GptOssForCausalLM(EXPERTS[GptOssForCausalLM])
    model.save_pretrained(tmp_path / "base")
    # Not square, so that no matrix can pass for its transpose.
    name = "mlp.experts.gate_up_proj"
    adapted = get_peft_model(model, LoraConfig(r=2, lora_alpha=8, target_parameters=[name]))
    _moved(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    # A row of the stack is a whole expert.
    monkeypatch.setattr(merge_file, "BLOCK_BYTES", 1)
    merge_folders(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    before, after = _tensors(tmp_path / "base"), _tensors(tmp_path / "out")
    theirs = adapted.merge_and_unload().state_dict()
    for layer in range(2):
        stack = f"model.layers.{layer}.{name}"
        torch.testing.assert_close(after[stack], theirs[stack], rtol=1e-5, atol=1e-6)
        changes = after[stack] - before[stack]
        assert all((change - changes[0]).abs().max() > 0.01 for change in changes[1:])


@pytest.fixture
def base(tmp_path):
    """A function that saves a model and an adapter of that kind, and gives the three folders."""

    def saved(kind, **how):
        config, lora = KINDS[kind]
        _model(config).to(how.pop("dtype", torch.float32)).save_pretrained(tmp_path / "base", **how)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _adapted(config, lora).save_pretrained(tmp_path / "adapter")
        return tmp_path / "base", tmp_path / "adapter", tmp_path / "out"

    return saved


@pytest.mark.parametrize("error", [None, errno.EXDEV, errno.ENOSYS])
@pytest.mark.filterwarnings("ignore")
def test_a_system_that_copies_no_parts_of_files_merges_into_the_same_bytes(
    error, base, monkeypatch
):
    weights, adapter, merged = base("plain", max_shard_size="20KB")
    merge_folders(weights, adapter, merged)

    def unsupported(*_):
        raise OSError(error, "unsupported")

    if error:
        monkeypatch.setattr(os, "copy_file_range", unsupported)
    else:
        monkeypatch.delattr(os, "copy_file_range")
    other = merged.with_name("other")
    merge_folders(weights, adapter, other)
    for file in merged.glob("*.safetensors"):
        assert (other / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_merges_as_peft_merges_it(kind, base):
    folders = base(kind, max_shard_size="20KB")
    facts = merge_folders(*folders)
    assert facts["changed"] > 0
    assert facts["shards"] > 1
    start = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    theirs = PeftModel.from_pretrained(start, folders[1]).merge_and_unload().eval()
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folders[2], dtype=torch.float32, output_loading_info=True
    )
    ours, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    mine = ours.state_dict()
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(mine[name], tensor, rtol=1e-5, atol=1e-6, msg=name)
    ids = torch.arange(12).view(1, -1)
    torch.testing.assert_close(ours.eval()(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-5)


def test_what_is_not_adapted_keeps_its_bytes_and_what_is_gets_rounded_once(base):
    folders = base("plain", dtype=torch.bfloat16)
    merge_folders(*folders)
    before, after, factors = (_tensors(folder) for folder in (folders[0], folders[2], folders[1]))
    assert list(before) == list(after)
    for name, tensor in before.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" not in factors:
            assert torch.equal(after[name], tensor)
            continue
        product = (
            factors[f"{module}.lora_B.weight"].double()
            @ factors[f"{module}.lora_A.weight"].double()
        )
        exact = tensor.double() + 2 * product
        assert (after[name] != exact.bfloat16()).double().mean() < 1e-3


def test_the_card_tells_what_was_merged_into_what(base):
    folders = base("magnitudes")
    (folders[0] / "README.md").write_text("---\nlicense: mit\n---\n# Of the base alone\n")
    (folders[1] / "LICENSE").write_text("The adapter's own.")
    facts = merge_folders(*folders)
    card = ModelCard.load(folders[2] / "README.md")
    said = card.data.to_dict()
    assert said["license"] == "mit"
    assert said["library_name"] == "transformers"
    assert "base_model" not in said  # a folder is nothing the hub could link to
    assert (folders[2] / "LICENSE").read_text() == "The adapter's own."
    lines = card.text.splitlines()
    assert "| base model | `base` |" in lines
    assert "| adapter type | DoRA of rank 4, alpha 8, on `down_proj`, `q_proj` |" in lines
    assert f"| merged into | {facts['changed']} of {facts['tensors']} tensors |" in lines
    assert str(folders[0].parent) not in card.content
    assert "Of the base alone" not in card.content
    assert "from_pretrained" in card.text


def test_a_larger_vocabulary_comes_with_its_tokens(base):
    folders = base("embedding and head")
    start = _model(QWEN)
    start.resize_token_embeddings(100, mean_resizing=False)
    lora = linear(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    get_peft_model(start, lora).save_pretrained(folders[1])
    merge_folders(*folders)
    merged = AutoModelForCausalLM.from_pretrained(folders[2])
    assert merged.config.vocab_size == 100
    trained = start.get_parameter("lm_head.modules_to_save.default.weight")
    assert torch.equal(merged.lm_head.weight, trained)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "IA3"}, "type IA3"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ],
)
def test_what_cannot_be_merged_is_refused_by_name_and_leaves_nothing(config, said, base):
    folders = base("plain")
    file = folders[1] / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with pytest.raises(CapabilityError, match=said):
        merge_folders(*folders)
    assert sorted(path.name for path in folders[0].parent.iterdir()) == ["adapter", "base"]


def test_another_base_model_is_refused_and_a_full_folder_left_alone(base):
    folders = base("plain")
    folders[2].mkdir()
    (folders[2] / "precious").touch()
    with pytest.raises(ConfigError, match="exists already"):
        merge_folders(*folders)
    _model(GPT2).save_pretrained(folders[0])
    with pytest.raises(CapabilityError, match="does not have"):
        merge_folders(folders[0], folders[1], folders[2].with_name("other"))
    assert [path.name for path in folders[2].iterdir()] == ["precious"]
