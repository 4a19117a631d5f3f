"""Layers of linear attention: documents of all lengths, and config.json as it is published.

Gradients are compared to 3e-5 of their norm: through states of many tokens fp32 sums in another
order differ by some 1e-5, transformers' from fp64 as much as ours.
"""

import pytest
import torch

from penstock.core.errors import CapabilityError, ConfigError
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
    assert seen.keys() == ours.weights.hf_shapes().keys()


def test_no_token_of_a_neighbour_reaches_a_document():
    pair = ours_with(hf_model("qwen3_next", tied=False), merge_qkv=True)
    first, second, third = documents([9, 70, 5])[0]
    with torch.no_grad():
        one = packed_logits(pair.ours, [first, second, third])
        other = packed_logits(pair.ours, [first, 130 - second, third])
    assert torch.equal(one[:9], other[:9])
    torch.testing.assert_close(one[79:], other[79:], atol=0, rtol=0)
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


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"linear_num_value_heads": 5}, r"value_heads \(5\) is not a multiple of .* \(2\)"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim is 0; it must be an integer of 1"),
        ({"layer_types": ["linear_attention"]}, "layer_types .* has 1 entries"),
        ({"layer_types": ["mamba"] * 3}, "layer_types names mamba"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; silu, swish are computed after conv"),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused_by_its_name(fields, says):
    with pytest.raises((CapabilityError, ConfigError), match=says):
        read("qwen3_5_text", **fields)
