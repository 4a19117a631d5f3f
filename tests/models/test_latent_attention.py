"""Latent attention: documents of all lengths, and config.json as it is published."""

import pytest
import torch

from penstock.adapters.inject import LoraSpec, inject
from penstock.core.errors import CapabilityError, ConfigError
from penstock.models.layers import latent_attention
from penstock.models.registry import get_family
from penstock_kernels.sparse_attention import latent_sparse_attention
from tests.models.stored import to_hf
from tests.models.twins import (
    MLA,
    ROUTED,
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


def topk_of_lowest_index(scores, k, dim=-1, **_):
    values, indices = scores.sort(dim=dim, descending=True, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


LENGTHS = [1, 63, 64, 65, 130, 1]


SIBLINGS = ["glm4_moe_lite", "youtu", "youtu-halves", "deepseek_v2-greedy", "deepseek_v3-dense"]


@pytest.mark.parametrize(
    "family",
    [
        *("deepseek_v3", "deepseek_v2", "minicpm3", "deepseek_v32", "glm_moe_dsa"),
        *(pytest.param(family, marks=pytest.mark.exhaustive) for family in SIBLINGS),
    ],
)
def test_packed_documents_of_any_length_are_computed_as_alone_in_transformers(family, monkeypatch):
    # Equal scores of an indexer: theirs takes any of them, ours those of the lowest index.
    monkeypatch.setattr(torch.Tensor, "topk", topk_of_lowest_index)
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
    assert_gradients_equal(seen, as_stored(theirs, gradients(theirs)))


PUBLISHED = {
    **SIZES,
    **MLA,
    **ROUTED,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


def read(**fields):
    said = {**PUBLISHED, "model_type": "deepseek_v3", **fields}
    return get_family(said, "native").read(said)


def test_files_from_before_transformers_5_and_of_kimi_k2_read_as_they_are_computed():
    config = read()
    assert config == read(model_type="kimi_k2")
    assert get_family({"model_type": "kimi_k2"}) is get_family({"model_type": "deepseek_v3"})
    # 0.1 * ln(40) + 1, once for queries and once for keys.
    assert config.attention_scale == pytest.approx(20**-0.5 * 1.3688879454**2)
    assert config.rope_parameters["rope_theta"] == 50000.0
    assert config.rope_head_dims[0] == 8
    assert config.rope_pairs == "neighbours"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2; .* num_attention_heads"),
        ({"head_dim": 24}, r"head_dim is 24; .* qk_rope_head_dim \(8\)"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'; noaux_tc"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; sigmoid"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7; RoPE rotates features in pairs"),
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0; it must be an integer of 1 or more"),
        (
            {"model_type": "deepseek_v2", "topk_method": "noaux_tc"},
            "topk_method is 'noaux_tc'; greedy and group_limited_greedy",
        ),
        (
            {
                "model_type": "deepseek_v2",
                "topk_method": "greedy",
                "scoring_func": "softmax",
                "norm_topk_prob": True,
            },
            r"norm_topk_prob is true: .*; write false here \(model.foundation overrides it\)",
        ),
        (
            {"model_type": "glm4_moe_lite", "first_k_dense_replace": 2},
            "first_k_dense_replace is 2; mlp_layer_types says",
        ),
        ({"model_type": "glm4_moe_lite", "mlp_layer_types": ["dense"]}, "has 1 entries"),
        ({"model_type": "deepseek_v32", "q_lora_rank": None}, "q_lora_rank is null"),
        ({"model_type": "deepseek_v32", "index_head_dim": 6}, "index_head_dim is 6, and RoPE"),
        ({"model_type": "deepseek_v32", "index_topk": 0}, "index_topk is 0"),
        ({"model_type": "deepseek_v32", "layer_types": ["full_attention"]}, "full_attention"),
        (
            {"model_type": "glm_moe_dsa", "index_topk_freq": 2, "index_skip_topk_offset": 1},
            "1 layers take over the selection of an earlier layer",
        ),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused_by_its_name(fields, says):
    with pytest.raises((CapabilityError, ConfigError), match=says):
        read(**fields)


class Gathering:
    """`latent_sparse_attention` by its definition, where a GPU would run its kernel."""

    def __init__(self):
        self.calls = 0

    def is_fast(self, *_):
        return True

    def __call__(self, *args):
        self.calls += 1
        return latent_sparse_attention.reference(*args)


@pytest.mark.parametrize("adapters", [False, True], ids=["plain", "adapters"])
def test_gathered_latent_vectors_give_what_keys_and_values_of_all_heads_do(monkeypatch, adapters):
    theirs = hf_model("deepseek_v32", tied=False, max_position_embeddings=256)
    ours, (ids, labels) = ours_with(theirs, merge_qkv=True), documents([1, 64, 65])
    if adapters:
        inject(ours.ours, LoraSpec(rank=4, alpha=8, targets=("kv_b_proj", "q_b_proj")))
        torch.manual_seed(0)
        for name, parameter in ours.ours.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)

    def computed():
        ours.ours.zero_grad()
        loss = packed_loss(ours.ours, ids, labels)
        loss.backward()
        return {"loss": loss.detach(), **gradients(ours.ours)}

    wanted = computed()
    gathering = Gathering()
    monkeypatch.setattr(latent_attention, "latent_sparse_attention", gathering)
    found = computed()
    assert gathering.calls == ours.ours.config.num_hidden_layers
    assert found.keys() == wanted.keys()
    for name, one in found.items():
        assert (one - wanted[name]).norm() <= 2e-5 * wanted[name].norm(), name
