import re

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from penstock.adapters.match_targets import linear_layers, match_targets
from penstock.adapters.targetable_layers import select_layers, targetable_layers
from penstock.core.errors import ConfigError
from penstock.models.decoder import Decoder
from penstock.models.registry import get_family
from penstock.models.vision.types import is_vision

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MODELS = {
    "dense": ("qwen3", {}),
    "some layers have experts": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [1]},
    ),
    "experts of other names": ("mixtral", {"num_local_experts": 4}),
    "experts in one tensor": ("gpt_oss", {"num_local_experts": 4}),
}


@pytest.mark.parametrize("merged", [True, False], ids=["fused", "apart"])
@pytest.mark.parametrize("kind", MODELS)
def test_layers_told_from_names_are_those_of_the_model(kind, merged):
    model_type, more = MODELS[kind]
    hf = AutoConfig.for_model(model_type, **SIZES, **more).to_dict()
    family = get_family(hf)
    config = family.read(hf)
    with torch.device("meta"):
        model = Decoder(config, merge_qkv=merged)
    told = list(linear_layers(family.weight_map(config, merge_qkv=merged)))
    assert {layer.name: layer.native for layer in told} == targetable_layers(model)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name, shape in shapes.items():
        rows = [one for one in told if one.of == name]
        here = sum(one.outputs * one.inputs * max(1, one.experts) for one in rows)
        assert here in (0, torch.Size(shape).numel())
    regex = r"re:model\.layers\.[\d]+.(mlp|self_attn).(up|down|q|o)_proj"
    for targets in (["all-linear"], ["q_proj", "layers.1.*.o_proj"], [regex], ["experts.*"]):
        if any("experts" in target for target in targets) and not config.experts:
            continue
        chosen = {layer.name for layer in match_targets(targets, told)}
        assert chosen == set(select_layers(model, targets))


@pytest.mark.parametrize(
    "regex",
    [
        r"model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj",
        r".*\.layers\.(1|7)\.self_attn\.(q|v)_proj|.*\.mlp\.gate_proj",
        "q_proj|.*o_proj",
    ],
)
def test_a_regular_expression_selects_the_layers_that_peft_selects_by_it(regex):
    config = AutoConfig.for_model("qwen3", **SIZES)
    family = get_family(config.to_dict())
    layers = linear_layers(family.weight_map(family.read(config.to_dict())))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        adapted = inject_adapter_in_model(LoraConfig(target_modules=regex), model)
    adapters = {
        name.partition(".lora_A")[0] for name, _ in adapted.named_parameters() if ".lora_A" in name
    }
    assert {layer.name for layer in match_targets([f"re:{regex}"], layers)} == adapters


@pytest.mark.parametrize("kind", ["gemma3", "smolvlm", "llava"])
def test_a_name_in_the_class_or_in_files_of_a_multimodal_model_selects_the_layer(kind):
    hf = AutoConfig.for_model(kind).to_dict()
    family = get_family(hf)
    names = family.weight_map(family.read(hf))
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind))
    [name, *_] = [
        name
        for name, _ in model.named_modules()
        if name.endswith("layers.1.self_attn.q_proj") and not is_vision(name)
    ]
    layers = list(linear_layers(names))
    for target in (name, f"re:{re.escape(name)}", "language_model.model.layers.1.*.q_proj"):
        [layer] = match_targets([target], layers)
        assert layer.native == "model.layers.1.self_attn.q_proj"
    text = AutoConfig.for_model("llama", **SIZES).to_dict()
    of_text = get_family(text)
    layers = linear_layers(of_text.weight_map(of_text.read(text)))
    assert not match_targets(["re:model.language_model.*"], layers)


def test_targets_that_the_model_lacks_are_refused_or_skipped_as_peft_does():
    config = AutoConfig.for_model("qwen3", **SIZES)
    hf = config.to_dict()
    family = get_family(hf)
    model = Decoder(family.read(hf))
    targets = ["q_proj", "fc1", "Wqkv"]
    with pytest.raises(ConfigError, match="'fc1' names no linear layer"):
        select_layers(model, targets)
    with torch.device("meta"):
        reference = AutoModelForCausalLM.from_config(config)
        adapted = inject_adapter_in_model(LoraConfig(target_modules=targets), reference)
    of_peft = [n.partition(".lora_A")[0] for n, _ in adapted.named_parameters() if ".lora_A" in n]
    assert select_layers(model, targets, skip_missing=True) == of_peft
    with pytest.raises(ConfigError, match="'Wqkv' names no linear layer"):
        select_layers(model, targets[1:], skip_missing=True)
