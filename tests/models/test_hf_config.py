"""Reading config.json, judged by transformers' own config classes."""

import time

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from penstock.core.errors import CapabilityError, ConfigError
from penstock.models.builtin import builtin_config
from penstock.models.foundation import apply_overrides
from penstock.models.layers.rotary import Rotary
from penstock.models.multimodal import MULTIMODAL
from penstock.models.registry import get_family
from tests.models.families import FAMILIES
from tests.models.twins import LLAMA3_ROPE, NEEDED, SIZES

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
UNTRUNCATED = {**YARN, "truncate": False, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
DEFAULT = {"rope_type": "default", "rope_theta": 5e5}


def read(**fields):
    config = {"model_type": "llama", **SIZES, **fields}
    return get_family(config, "native").read(config)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_fields_left_out_have_the_defaults_of_transformers(model_type):
    written = {"model_type": model_type, **SIZES, **NEEDED.get(model_type, {})}
    full = transformers.AutoConfig.for_model(**written).to_dict()
    assert FAMILIES[model_type].read(written) == FAMILIES[model_type].read(full)


@pytest.mark.parametrize(
    "rope", [DEFAULT, LINEAR, YARN, UNTRUNCATED, LLAMA3_ROPE], ids=lambda r: r["rope_type"]
)
def test_rotary_angles_are_those_of_transformers(rope):
    config = read(rope_parameters=rope)
    theirs = LlamaRotaryEmbedding(
        transformers.LlamaConfig(**{**SIZES, "rope_parameters": dict(rope)})
    )
    ours = Rotary(config.rope_parameters, head_dim=config.head_dim, max_position_embeddings=64)
    at = torch.arange(64)
    cos, sin = theirs(torch.zeros(1), at[None])
    mine = ours.angles(at, torch.float32)
    assert torch.equal(mine[0], cos[0])
    assert torch.equal(mine[1], sin[0])


TEXT_SIZES = {name: value for name, value in SIZES.items() if name != "tie_word_embeddings"}


@pytest.mark.parametrize("model_type", [kind for kind in MULTIMODAL if kind.startswith("qwen")])
@pytest.mark.parametrize("tied", [True, False])
def test_the_language_model_of_a_multimodal_one_has_its_numbers_and_defaults(model_type, tied):
    is_qwen3 = model_type.startswith("qwen3_vl")
    more = {"head_dim": 16} if is_qwen3 else {}
    written = {"model_type": model_type, "tie_word_embeddings": tied}
    written["text_config"] = {**TEXT_SIZES, **more}
    full = transformers.AutoConfig.for_model(**written).to_dict()
    config = get_family(full).read(full)
    assert config == get_family(written).read(written)
    assert config.tie_word_embeddings == tied
    # As they were before transformers 5: rotary positions of three axes were a kind of their own.
    theta = full["text_config"]["rope_parameters"]["rope_theta"]
    old = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "rope_theta": theta}
    of_old = {**written, "text_config": {**TEXT_SIZES, **more, **old}}
    assert get_family(of_old).read(of_old) == config
    if not is_qwen3:
        flat = {"model_type": model_type, **TEXT_SIZES, **old, "tie_word_embeddings": tied}
        assert get_family(flat).read(flat) == config


EVERY_LAYER, WINDOW = (4, 4, 4), {"sliding_window": 4}
USED = {"use_sliding_window": True, **WINDOW}
MIXED = ["full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"model_type": "qwen2", **USED}, (None, None, None)),
        ({"model_type": "qwen2", **USED, "max_window_layers": 2}, (None, None, 4)),
        ({"model_type": "qwen3", **USED, "layer_types": MIXED}, (None, 4, None)),
        ({"model_type": "qwen3_moe", **USED}, EVERY_LAYER),
        ({"model_type": "qwen3_moe", "sliding_window": 4}, (None, None, None)),
        ({"model_type": "qwen2_moe", **USED}, (4, None, 4)),
        ({"model_type": "qwen2_moe", **USED, "max_window_layers": 2}, (4, None, None)),
        ({"model_type": "qwen2_moe", **USED, "layer_types": MIXED}, (None, 4, None)),
        (
            {"model_type": "dots1", "first_k_dense_replace": 3, **WINDOW, "max_window_layers": 1},
            (None, 4, 4),
        ),
        ({"model_type": "mixtral", "sliding_window": 4}, EVERY_LAYER),
        ({"model_type": "gpt_oss", "sliding_window": 4}, (4, None, 4)),
        ({"model_type": "gpt_oss", "sliding_window": 4, "layer_types": MIXED}, (None, 4, None)),
    ],
    ids=str,
)
def test_windows_lie_where_transformers_has_them(fields, windows):
    config = read(**fields)
    assert tuple(map(config.layer_window, range(3))) == windows
    theirs = transformers.AutoConfig.for_model(**{**SIZES, **fields})
    everywhere = ["sliding_attention" if theirs.sliding_window else "full_attention"] * 3
    kinds = getattr(theirs, "layer_types", None) or everywhere
    assert [window is not None for window in windows] == [k == "sliding_attention" for k in kinds]


@pytest.mark.parametrize("kind", ["rope_type", "type"])
def test_configs_written_before_transformers_5_read_the_same(kind):
    scaling = {key: v for key, v in LLAMA3_ROPE.items() if key not in ("rope_type", "rope_theta")}
    old = read(rope_theta=500_000.0, rope_scaling={kind: "llama3", **scaling})
    assert old == read(rope_parameters=LLAMA3_ROPE)
    assert read(rope_theta=7.0, rope_scaling=None).rope_parameters == {
        "rope_type": "default",
        "rope_theta": 7.0,
    }


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; silu, swish, gelu, "),
        (
            {"model_type": "qwen3_moe", "hidden_act": "gelu"},
            "hidden_act is 'gelu'; silu, swish are",
        ),
        ({"model_type": "glm4_moe", "use_sliding_window": True}, "use_sliding_window is true"),
        ({"model_type": "qwen3", "layer_types": ["linear_attention"]}, "names linear_attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "names sliding_attention"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"quantization_config": {"quant_method": "awq"}}, "says quant_method 'awq'; fp8, "),
        ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, "of the kind 'spiral'"),
        (
            {"rope_parameters": {"rope_type": "spiral"}},
            "default, linear, llama3, yarn, proportional, dynamic, longrope are computed",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        ({"model_type": "minimax_m2", "router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        (
            {"model_type": "minimax_m2", "output_router_logits": True},
            "output_router_logits is true",
        ),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv is 8.0"),
        (
            {"model_type": "hunyuan_v1_moe", "num_experts": 4, "moe_topk": [1, 2, 2]},
            "moe_topk differs between layers",
        ),
        ({"model_type": "ernie4_5_moe", "use_bias": True}, "use_bias is true"),
        ({"model_type": "ernie4_5_moe", "moe_norm_min": 0.5}, "moe_norm_min is 0.5"),
        ({"model_type": "qwen4"}, "model_type 'qwen4'; .* Did you mean qwen"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_what_is_not_computed_is_refused_by_name(fields, says):
    with pytest.raises(CapabilityError, match=says):
        read(**fields)


def test_a_language_model_without_a_native_family_is_refused_by_the_native_backend():
    llava = {"model_type": "llava", "text_config": {"model_type": "qwen4"}}
    with pytest.raises(CapabilityError, match="of this llava is of the type 'qwen4'"):
        get_family(llava, "native")


def test_everything_not_computed_is_named_at_once():
    with pytest.raises(CapabilityError) as error:
        read(hidden_act="relu", attention_dropout=0.5)
    assert "relu" in str(error.value)
    assert "attention_dropout" in str(error.value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"vocab_size": None}, "has no vocab_size"),
        ({"num_key_value_heads": 4}, r"\(6\) is not a multiple of its num_key_value_heads \(4\)"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": True}, "num_key_value_heads is True; it must be an integer of 1"),
        (
            {"model_type": "mixtral", "num_experts_per_tok": True},
            "experts_per_token is True; it must be an integer of 1 or more",
        ),
        (
            {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 3},
            "sliding_window is None, and 3 layers use it",
        ),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "chooses 9 of 8 experts"),
        ({"model_type": "glm4_moe", "n_group": 3}, r"128 experts .* of their groups \(3\)"),
        ({"model_type": "glm4_moe", "n_group": 2, "topk_group": 3}, "chooses 3 of 2 groups"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_numbers_that_make_no_model_are_refused(fields, says):
    with pytest.raises(ConfigError, match=says):
        read(**fields)


def test_a_number_of_layers_that_no_model_has_is_refused_at_once():
    with pytest.raises(ConfigError, match=r"is 1,000,000,000; it must be at most 10,000"):
        read(num_hidden_layers=10**9)


@pytest.mark.parametrize("size", [10**9, 10**18])
@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen3-moe", "tiny-gpt-oss"])
def test_sizes_that_no_model_has_are_refused_at_once_or_read_at_once(name, size):
    """Whatever the field: nothing is listed that many times."""
    base = builtin_config(name)
    refused = set[str]()
    for field, value in base.items():
        if type(value) is not int:
            continue
        began = time.process_time()
        try:
            changed = apply_overrides(base, {field: size})
            get_family(changed).read(changed)
        except ConfigError:
            refused.add(field)
        assert time.process_time() - began < 1
    assert {"num_hidden_layers", "num_key_value_heads"} <= refused
    assert {each for each in base if "experts" in each} <= refused
    assert size < 10**10 or {"hidden_size", "vocab_size", "num_attention_heads"} <= refused


def test_experts_are_counted_over_all_layers():
    base = builtin_config("tiny-qwen3-moe")
    assert apply_overrides(base, {"num_experts": 512})["num_experts"] == 512
    with pytest.raises(ConfigError, match=r"num_experts is 60,000; at most 50,000"):
        apply_overrides(base, {"num_hidden_layers": 4, "num_experts": 60_000})
