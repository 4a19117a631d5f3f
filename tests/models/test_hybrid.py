"""Layers of linear attention: documents of all lengths, and config.json as it is published.

Gradients are compared to 3e-5 of their norm: through states of many tokens fp32 sums in another
order differ by some 1e-5, transformers' from fp64 as much as ours.
"""

import pytest
import torch

from penstock.core.errors import CapabilityError, ConfigError
from penstock.models.linear_config import GatedDeltaConfig, KimiDeltaConfig
from penstock.models.mamba2_config import Mamba2Config
from penstock.models.registry import get_family
from tests.models.stored import to_hf
from tests.models.twins import (
    GATED_DELTA,
    GATED_EXPERTS,
    HYBRID,
    SIZES,
    as_stored,
    assert_gradients_equal,
    documents,
    gradients,
    hf_model,
    ours_with,
    packed_logits,
    packed_loss,
    their_logits,
    their_loss,
)

LENGTHS = [1, 63, 64, 65, 130, 1]


@pytest.mark.parametrize("family", HYBRID)
def test_packed_documents_of_any_length_are_computed_as_alone_in_transformers(family):
    theirs = hf_model(family, tied=False, max_position_embeddings=256)
    ours, (ids, labels) = ours_with(theirs, merge_qkv=True), documents(LENGTHS)
    with torch.no_grad():
        found = packed_logits(ours.ours, ids).split(LENGTHS)
        for document, logits in zip(ids, found, strict=True):
            wanted = their_logits(theirs, document)
            assert (logits - wanted).norm() <= 1e-5 * wanted.norm()
    loss, their_sum = packed_loss(ours.ours, ids, labels), their_loss(theirs, ids, labels)
    torch.testing.assert_close(loss, their_sum, rtol=1e-6, atol=0)
    loss.backward()
    their_sum.backward()
    seen = {}
    for name, gradient in gradients(ours.ours).items():
        seen |= to_hf(ours.weights, name, gradient)
    assert_gradients_equal(seen, as_stored(theirs, gradients(theirs)), limit=3e-5)
    names = ours.weights
    assert seen.keys() == {name for name in names.hf_shapes() if not names.is_exact(name)}


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "olmo_hybrid", "kimi_linear"])
def test_no_token_of_a_neighbour_reaches_a_document(family):
    pair = ours_with(hf_model(family, tied=False), merge_qkv=True)
    first, second, third = documents([9, 70, 5])[0]
    with torch.no_grad():
        one = packed_logits(pair.ours, [first, second, third])
        other = packed_logits(pair.ours, [first, 130 - second, third])
    # Products of its experts sum in another order where they have other numbers of rows.
    atol = 1e-5 if family == "kimi_linear" else 0
    torch.testing.assert_close(one[:9], other[:9], atol=atol, rtol=0)
    torch.testing.assert_close(one[79:], other[79:], atol=atol, rtol=0)
    assert not torch.equal(one[9:79], other[9:79])


def read(model_type, **fields):
    said = {**SIZES, **GATED_DELTA, **GATED_EXPERTS, "model_type": model_type, **fields}
    return get_family(said, "native").read(said)


def test_layers_are_those_of_the_interval_where_config_json_names_none():
    config = read("qwen3_next", layer_types=None, num_hidden_layers=9)
    assert config.linear_layers == (0, 1, 2, 4, 5, 6, 8)
    assert config.softmax_layers == 2
    every = read("qwen3_5_text", layer_types=None, full_attention_interval=2)
    assert every.linear_layers == (0, 2)
    assert read("qwen3_5_moe_text", rope_parameters=None).rotary_dim == 4


def test_olmo_hybrid_has_rope_unless_its_theta_is_null():
    whole = {"rope_parameters": None}
    assert read("olmo_hybrid", **whole).no_rope_layers == ()
    for rope in ({"rope_theta": None}, {"rope_parameters": {"rope_theta": None}}):
        assert read("olmo_hybrid", **{**whole, **rope}).no_rope_layers == (0, 1, 2)
    sizes = {name: None for name in GATED_DELTA if name.startswith("linear_")}
    plain = read("olmo_hybrid", **whole, **sizes, layer_types=None)
    assert plain.linear_layers == (0, 1)
    assert isinstance(plain.linear, GatedDeltaConfig)
    assert (plain.linear.key_heads, plain.linear.key_dim, plain.linear.value_dim) == (6, 6, 12)


def test_kimi_linear_reads_published_files():
    own = {"num_heads": 3, "head_dim": 5, "short_conv_kernel_size": 2}
    own |= {"full_attn_layers": [2], "kda_layers": [1, 3]}
    said = {"num_key_value_heads": 6, "rope_parameters": None, "head_dim": 72, "layer_types": None}
    told = {"num_experts": 10, "num_experts_per_token": 4, "num_shared_experts": 2}
    told |= {"num_expert_group": 5, "topk_group": 2, "moe_renormalize": False}
    told |= {"model_max_length": 99, "first_k_dense_replace": 2, "rope_theta": 5.0}
    config = read("kimi_linear", **said, **told, linear_attn_config=own)
    assert config.linear_layers == (0, 2)
    assert isinstance(config.linear, KimiDeltaConfig)
    assert (config.linear.heads, config.linear.key_dim, config.linear.kernel) == (3, 5, 2)
    assert config.max_position_embeddings == 99
    experts = config.experts
    assert experts is not None
    assert (experts.layers, experts.num_experts, experts.experts_per_token) == ((2,), 10, 4)
    assert (experts.num_groups, experts.norm_topk_prob) == (5, False)
    assert experts.shared_intermediate_size == 2 * 24
    with pytest.raises(CapabilityError, match="mla_use_nope is False; True is computed"):
        read("kimi_linear", **said, mla_use_nope=False)


def test_lfm2_reads_files_of_its_first_releases():
    old = {"layer_types": None, "rope_parameters": None, "rope_theta": 1e6}
    renamed = {"full_attn_idxs": [1], "tie_embedding": False, "block_ff_dim": 999}
    config = read("lfm2", **old, **renamed, block_multiple_of=7, block_ffn_dim_multiplier=1.1)
    assert config.linear_layers == (0, 2)
    assert not config.tie_word_embeddings
    assert config.intermediate_size == 735  # 999 * 2 / 3 = 666, * 1.1 = 732
    assert read("lfm2", **old).linear_layers == ()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"linear_num_value_heads": 5}, r"value_heads \(5\) is not a multiple of .* \(2\)"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim is 0; it must be an integer of 1"),
        ({"layer_types": ["linear_attention"]}, "layer_types .* has 1 entries"),
        ({"layer_types": ["conv"] * 3}, "layer_types names conv"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; silu, swish are computed after conv"),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused_by_its_name(fields, says):
    with pytest.raises((CapabilityError, ConfigError), match=says):
        read("qwen3_5_text", **fields)


@pytest.mark.parametrize("family", ["kimi_linear", "mellum"])
def test_too_few_kinds_of_mlps_are_refused_by_their_name(family):
    with pytest.raises(ConfigError, match=r"model's mlp_layer_types .* has 1 entries"):
        read(family, mlp_layer_types=["sparse"])


MAMBA_SIZES = {**SIZES, **HYBRID["granitemoehybrid"], "num_hidden_layers": 3}


def granite4(**fields):
    said = {**MAMBA_SIZES, "model_type": "granitemoehybrid", **fields}
    return get_family(said, "native").read(said)


def nemotron_h(**fields):
    sizes = {name: value for name, value in SIZES.items() if name != "num_hidden_layers"}
    said = {**sizes, **HYBRID["nemotron_h"], "model_type": "nemotron_h", **fields}
    return get_family(said, "native").read(said)


def test_kinds_of_layers_are_read_by_their_old_names_too():
    assert granite4(layer_types=["mamba", "attention", "mamba"]).linear_layers == (0, 2)
    assert granite4(layer_types=["attention"] * 3).linear is None
    config = nemotron_h(layers_block_type=None, hybrid_override_pattern="M-*-")
    assert (config.num_hidden_layers, config.linear_layers, config.softmax_layers) == (4, (0,), 1)
    assert (config.without_mixer, config.without_mlp) == ((1, 3), (0, 2))


def test_limits_of_time_steps_are_read_as_transformers_writes_them():
    limits = granite4(time_step_limit=[0.1, {"__float__": "Infinity"}]).linear
    assert isinstance(limits, Mamba2Config)
    assert (limits.min_step, limits.max_step) == (0.1, float("inf"))


MOE_ONLY = {"layers_block_type": ["moe"]}


@pytest.mark.parametrize(
    ("read", "fields", "says"),
    [
        (granite4, {"mamba_n_heads": 7}, r"mamba_n_heads \(7\) heads of .* are not mamba_expand"),
        (granite4, {"mamba_n_groups": 3}, r"mamba_n_heads \(8\) is not a multiple of .* \(3\)"),
        (granite4, {"layer_types": ["mamba"]}, "layer_types .* has 1 entries"),
        (nemotron_h, {**MOE_ONLY, "moe_latent_size": -1}, "latent experts have -1 features"),
        (nemotron_h, {**MOE_ONLY, "topk_group": 5}, "a token chooses 5 of 4 groups"),
        (nemotron_h, {"layers_block_type": ["conv"]}, "layers_block_type .* names conv"),
        (nemotron_h, {"n_groups": 0}, "n_groups is 0; it must be an integer of 1"),
        (nemotron_h, {"mamba_hidden_act": "gelu"}, "mamba_hidden_act is 'gelu'; silu, swish"),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_what_mamba_does_not_compute_is_refused_by_its_name(read, fields, says):
    with pytest.raises((CapabilityError, ConfigError), match=says):
        read(**fields)
