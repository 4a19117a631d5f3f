"""`model.foundation`: entries laid over config.json change the model, or are refused."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from penstock.core.errors import CapabilityError, ConfigError
from penstock.models.automodel import describe, family
from penstock.models.automodel.family import AutoFamily
from penstock.models.decoder import Decoder
from penstock.models.foundation import NO_EFFECT, apply_overrides, check_foundation
from penstock.models.initialize import generator_for, initialize
from penstock.models.registry import get_family
from penstock_kernels.attention import VarlenMetadata
from tests.models.families import FAMILIES
from tests.models.twins import ALIKE, HYBRID, LATENT, LLAMA3_ROPE, NEEDED, SIZES, SPARSE
from tests.turns import taking_turns

TOKENS = 24

BASES: dict[str, dict[str, Any]] = {
    name: {
        **SIZES,
        **(SPARSE | LATENT | HYBRID).get(name, {}),
        **NEEDED.get(name, {}),
        "num_hidden_layers": 2,
    }
    for name in FAMILIES
}

WITH_WINDOWS = (
    "cohere2",
    "cwm",
    "exaone4",
    "cohere2_moe",
    "exaone_moe",
    "gemma2",
    "gemma3_text",
    "granite_swa",
    "mellum",
    "ministral",
    "olmo3",
    "vaultgemma",
)
for name in WITH_WINDOWS:
    BASES[name] |= {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}

BASES["llama4_text"] |= {"no_rope_layers": [1, 0], "moe_layers": [1]}
BASES["cohere2_moe"]["mlp_layer_types"] = ["dense", "sparse"]
BASES["nemotron_h"]["layers_block_type"] = ["linear_attention", "mlp", "full_attention"]
BASES["bamba"]["attn_layer_indices"] = [1]
for name in (HYBRID.keys() & FAMILIES.keys()) - {"nemotron_h", "bamba"}:
    BASES[name]["layer_types"] = BASES[name]["layer_types"][:2]
BASES["kimi_linear"]["mlp_layer_types"] = ["dense", "sparse"]
BASES["lfm2_moe"]["num_experts_per_tok"] = 5  # so that one more expert is chosen too
BASES["lfm2"]["block_multiple_of"] = 1
BASES["qwen3_next"]["mlp_only_layers"] = [1]
del BASES["qwen3_5_moe_text"]["intermediate_size"]  # it has no dense layers

BASES["mellum"]["mlp_layer_types"] = ["dense", "sparse"]

OTHER: dict[str, Any] = {
    "hidden_size": 60,
    "num_attention_heads": 4,
    "num_key_value_heads": 3,
    "num_hidden_layers": 1,
    "swiglu_limit": 1e-3,
    "sliding_window": 3,
    "rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
    "rms_norm_eps": 0.5,
    "layer_types": ["sliding_attention", "sliding_attention"],
    "n_group": 2,
    "initializer_range": 0.05,
    "mlp_only_layers": [0],
    "moe_layer_interval": 3,
    "moe_layer_end_index": 0,
    "head_dim": 24,
}
"""Other values, where one more, or the opposite, would not do or would not show."""

ELSEWHERE = {
    "model_max_length": "the same in Kimi Linear's files",
    "max_position_embeddings": "samples that are drawn during training end there",
    "router_aux_loss_coef": "the load-balancing loss is multiplied by it",
    "output_router_logits": "decides whether there is a load-balancing loss",
}
"""Entries that change something other than logits."""


OTHER_ROPE: dict[str, Any] = {
    "phi3": {"rope_theta": 5e5},
    "olmo3": {"full_attention": {"rope_theta": 123.0}},
    "gemma3_text": {"full_attention": {"rope_theta": 123.0}},
    "gemma4_text": {"full_attention": {"rope_theta": 123.0}},
    "granite_swa": {"rope_type": "linear", "factor": 2.0},
    "mellum": {"full_attention": {"rope_theta": 123.0}},
}
"""Where RoPE has other types, or a table for each kind of layer."""

KNOWN = {
    "use_bidirectional_attention": False,
    "clip_qkv": 1.0,
    "rms_norm_eps": 1.0,
    "attn_logit_softcapping": 1.0,
}
"""What an entry is that transformers writes as null."""


@pytest.fixture(autouse=True, scope="module")
def _without_saved_activations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What layers save is not looked at here, and takes long to count. No other test gets such
    outlines from the cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_CACHE_HOME", str(tmp_path_factory.mktemp("outlines")))
        patch.setattr(describe, "saved_activations", lambda *_: {})
        yield
    family._family.cache_clear()


def other_than(name: str, value: Any, model_type: str) -> Any:
    if name in ("hidden_act", "hidden_activation"):
        return "gelu" if value == "silu" else "silu"
    if name == "rope_parameters" and model_type in OTHER_ROPE:
        return OTHER_ROPE[model_type]
    if (model_type, name) == ("gemma4_text", "layer_types"):
        return ["full_attention", "full_attention"]  # as the last is always
    if name in OTHER:
        return OTHER[name]
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else f"{value}?"


def logits(config: dict[str, Any]) -> torch.Tensor:
    """Of a model whose start is far from what models start with, so that everything in it shows."""
    decoder = get_family(config).read(config)
    names = get_family(config).weight_map(decoder)
    model = Decoder(decoder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parts = [initialize(n, names.hf_shapes()[n], 0, decoder) for n in names.hf_names(name)]
            start = torch.cat([p.flatten() for p in parts]).view_as(parameter)
            noise = torch.randn(parameter.shape, generator=generator_for(name, 1))
            parameter.copy_(start * 5 + noise * 0.3)
    ids, at = torch.arange(TOKENS) % 7 * 11, torch.arange(TOKENS)
    return model(ids, at, VarlenMetadata.of([TOKENS], "cpu"))


def changes(base: dict[str, Any], own: torch.Tensor, name: str, value: Any) -> bool:
    """Whether the model is another one than `base`, whose logits are `own`."""
    changed = apply_overrides(base, {name: value})
    if name in ELSEWHERE:
        return get_family(base).read(base) != get_family(changed).read(changed)
    other = logits(changed)
    return own.shape != other.shape or not torch.equal(own, other)


@pytest.mark.parametrize(
    "model_type",
    [
        *taking_turns([name for name in FAMILIES if name not in ALIKE], 20),
        *(pytest.param(n, marks=pytest.mark.exhaustive) for n in FAMILIES if n in ALIKE),
    ],
)
def test_every_entry_changes_the_model_or_is_refused(model_type: str) -> None:
    torch.manual_seed(0)
    base = transformers.AutoConfig.for_model(model_type, **BASES[model_type]).to_dict()
    own = logits(base)
    accepted, refused = set[str](), list[tuple[str, str]]()
    for name, value in base.items():
        if name == "model_type":
            continue
        other = other_than(name, value, model_type)
        try:
            check_foundation(base, {name: other})
        except (ConfigError, CapabilityError) as refusal:
            refused.append((name, str(refusal)))
            continue
        if isinstance(get_family(apply_overrides(base, {name: other})), AutoFamily):
            continue  # transformers computes what the native family does not
        assert changes(base, own, name, other), f"{name}: {other!r} changes nothing"
        accepted.add(name)
    assert all(name in says or "the model" in says for name, says in refused)
    never = {"vocab_size", "num_hidden_layers", "tie_word_embeddings", "max_position_embeddings"}
    # OPT's says the width of embeddings apart.
    others = {"hidden_size", "initializer_range", "rope_parameters"}
    if model_type == "opt":
        others = {"init_std"}
    if model_type in ("granitemoehybrid", "bamba"):
        others -= {"hidden_size"}  # of which heads of Mamba-2 are a multiple
    if model_type == "nemotron_h":  # it has no RoPE, counts `layers_block_type`, and ties nothing
        never = {"vocab_size", "max_position_embeddings"}
        others = {"hidden_size", "initializer_range"}
    if model_type == "kimi_linear":  # it has no RoPE, another name of the length, and ties nothing
        never, others = {"vocab_size", "num_hidden_layers"}, {"hidden_size", "initializer_range"}
    assert never | others <= accepted


THETA = [
    {"rope_theta": 123.0},
    {"rope_parameters": {"rope_theta": 123.0}},
    {"rope_scaling": {"rope_theta": 123.0}},
]
STYLES = {
    "transformers 5": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "before": {"rope_theta": 1e4, "rope_scaling": None},
    "neither": {},
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("entries", THETA, ids=lambda entries: next(iter(entries)))
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "ernie4_5"])
def test_either_spelling_of_rotary_embedding_sets_it_in_either_style_of_file(
    model_type: str, entries: dict[str, Any], style: str
) -> None:
    base = {"model_type": model_type, **SIZES, **SPARSE.get(model_type, {}), **STYLES[style]}
    merged = apply_overrides(base, entries)
    check_foundation(base, entries)
    assert get_family(merged).read(merged).rope_parameters["rope_theta"] == 123.0
    # What is exported says it once, and transformers reads the same.
    theirs = transformers.AutoConfig.for_model(**merged)
    assert theirs.rope_parameters["rope_theta"] == 123.0
    assert str(merged).count("rope_theta") == 1


def test_a_scaled_embedding_can_be_changed_in_part_or_replaced() -> None:
    base = {"model_type": "llama", **SIZES, "rope_parameters": LLAMA3_ROPE}
    wider = apply_overrides(base, {"rope_scaling": {"factor": 16.0}})["rope_parameters"]
    assert wider == {**LLAMA3_ROPE, "factor": 16.0}
    entries = {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert apply_overrides(base, entries)["rope_parameters"] == {
        "rope_type": "linear",
        "rope_theta": 500_000.0,
        "factor": 2.0,
    }
    by_layer = {"full_attention": LLAMA3_ROPE, "sliding_attention": {"rope_theta": 1e4}}
    gemma = {"model_type": "gemma3_text", **SIZES, "rope_parameters": by_layer}
    entries = {"rope_parameters": {"full_attention": {"factor": 16.0}}}
    assert apply_overrides(gemma, entries)["rope_parameters"] == {
        **by_layer,
        "full_attention": {**LLAMA3_ROPE, "factor": 16.0},
    }
    plain = apply_overrides(base, {"rope_scaling": None})["rope_parameters"]
    assert plain == {"rope_type": "default", "rope_theta": 500_000.0}


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"rope_thetta": 1.0}, "did you mean rope_theta?"),
        ({"rope_parameters": {"beta_fast": 3.0}}, "rope_parameters.beta_fast: 3.0 has no effect"),
        ({"num_local_experts": 4}, "models of the type llama have no such field"),
        ({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}}, "says rope_theta twice"),
        ({"use_cache": False}, "training has no cache"),
        ({"hidden_size": 96, "sliding_window": 4}, "foundation.sliding_window: 4 has no effect"),
    ],
)
def test_an_entry_without_effect_is_an_error_that_names_it(
    entries: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=r"model\.foundation") as refusal:
        check_foundation({"model_type": "llama", **SIZES}, entries)
    assert says in str(refusal.value)


def test_the_width_of_the_start_is_refused_where_weights_are_loaded() -> None:
    base = {"model_type": "llama", **SIZES}
    check_foundation(base, {"initializer_range": 0.5})
    with pytest.raises(ConfigError, match="all weights are loaded"):
        check_foundation(base, {"initializer_range": 0.5}, loads_weights=True)


def test_other_names_of_one_number_change_the_one_that_the_file_has() -> None:
    base = {"model_type": "qwen3_moe", **SIZES, **SPARSE["qwen3_moe"]}
    merged = apply_overrides(base, {"num_local_experts": 4})
    assert (merged["num_experts"], "num_local_experts" in merged) == (4, False)


def test_what_follows_from_other_entries_follows_them() -> None:
    base = {"model_type": "gpt_oss", **SIZES, **SPARSE["gpt_oss"]}
    base |= {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    assert apply_overrides(base, {"num_hidden_layers": 2})["layer_types"] == base["layer_types"][:2]
    with pytest.raises(ConfigError, match="layer_types for 3 layers"):
        apply_overrides(base, {"num_hidden_layers": 4})
    other = apply_overrides({**base, "architectures": ["GptOss"]}, {"model_type": "mixtral"})
    assert other["architectures"] == ["MixtralForCausalLM"]
    assert all(hasattr(transformers, family.architecture) for family in FAMILIES.values())


@pytest.mark.parametrize("name", NO_EFFECT)
def test_entries_that_are_no_property_of_a_model_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"foundation\.{name}: 5 has no effect"):
        check_foundation({"model_type": "llama", **SIZES}, {name: 5})


UNLIKE = (
    "deepseek_v3",
    "gemma3_text",
    "glm_moe_dsa",
    "gpt_oss",
    "llama",
    "llama4_text",
    "nemotron_h",
    "opt",
    "qwen3_next",
)
"""Families whose config.json have different entries; others are tried by `-m exhaustive`."""

BY_KIND = [
    *taking_turns(UNLIKE, 3),
    *(pytest.param(n, marks=pytest.mark.exhaustive) for n in FAMILIES if n not in UNLIKE),
]

KINDS: list[Any] = ["x", "4", {}, {"a": 1}, {"a": {}}, [1], [{}], True, 0, 1.5, float("inf"), None]
"""Values of every kind that YAML has."""


@pytest.mark.slow
@pytest.mark.parametrize("model_type", BY_KIND)
def test_no_value_of_any_kind_is_a_traceback_and_no_table_says_nothing(model_type: str) -> None:
    base = transformers.AutoConfig.for_model(model_type, **BASES[model_type]).to_dict()
    names = [*base, "rope_theta", "rope_scaling", "partial_rotary_factor", "nonsense"]
    for name in names:
        for value in KINDS:
            try:
                check_foundation(base, {name: value})
            except (ConfigError, CapabilityError):
                continue
            assert value != {}, f"{name}: {{}} is accepted"
            is_number = isinstance(base.get(name), int | float)
            is_other = isinstance(value, str | list | dict)
            assert not (is_number and is_other), f"{name}: {value!r} is accepted"


FALSY: list[Any] = [[], {}, "", 0, 0.0, False]


@pytest.mark.parametrize("model_type", BY_KIND)
def test_a_value_that_is_falsy_is_refused_where_it_is_not_of_the_entrys_kind(
    model_type: str,
) -> None:
    """Also where config.json lacks the entry: what is read as false there is not left out."""
    whole = transformers.AutoConfig.for_model(model_type, **BASES[model_type]).to_dict()
    for base in (whole, {"model_type": model_type, **BASES[model_type]}):
        for name in {*whole, "quantization_config", "layer_types"}:
            for value in FALSY:
                try:
                    check_foundation(base, {name: value})
                except (ConfigError, CapabilityError):
                    continue
                known = base.get(name) if base.get(name) is not None else whole.get(name)
                known = KNOWN.get(name) if known is None else known
                assert known is not None, f"{name}: {value!r} is accepted"
                both = (isinstance(value, bool), isinstance(known, bool))
                assert both in ((True, True), (False, False)), f"{name}: {value!r} is accepted"
                kinds = (str, list, int | float)
                assert any(isinstance(value, k) and isinstance(known, k) for k in kinds), name


@pytest.mark.parametrize("value", FALSY, ids=repr)
def test_a_quantization_config_that_is_no_table_is_refused_by_name(value: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"foundation\.quantization_config: .*(table|leave it out)"
    ):
        check_foundation({"model_type": "llama", **SIZES}, {"quantization_config": value})


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps: '1e-5' is text, and config.json has 1e-06"),
        ({"rope_parameters": {}}, "rope_parameters: {} has no effect; leave it out"),
        ({"num_hidden_layers": 2, "anything": {}}, "foundation.anything: {} has no effect"),
        ({"rope_scaling": "yarn"}, "Write one, such as {rope_type: linear, factor: 2.0}"),
        ({"hidden_size": 96, "num_attention_heads": 0}, "num_attention_heads (0) cannot be read"),
        ({"rope_theta": [1e4]}, "rope_theta: [10000.0] is a list; write a number"),
    ],
)
def test_a_value_that_no_such_entry_has_is_told_with_the_entry(
    entries: dict[str, Any], says: str
) -> None:
    base = {"model_type": "llama", **SIZES, "rms_norm_eps": 1e-6}
    with pytest.raises(ConfigError) as refusal:
        check_foundation(base, entries)
    assert says in str(refusal.value)
