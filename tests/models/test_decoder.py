"""What the decoder promises to whoever assembles, wraps or fills it."""

import copy

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.models.decoder import Decoder
from penstock.models.initialize import initialize
from penstock.models.layers.attention import in_bf16
from penstock.models.layers.experts import Experts
from penstock.models.layers.router import Router
from penstock.models.tp_roles import ParallelStyle, find_parallel_style, shard_unit
from penstock_kernels.attention import VarlenMetadata, attention
from tests.models.families import FAMILIES
from tests.models.stored import from_hf
from tests.models.twins import FAMILIES as DENSE
from tests.models.twins import (
    HYBRID,
    NEEDED,
    SIZES,
    SPARSE,
    documents,
    packed_logits,
    packed_loss,
)

SHAPES = DENSE | SPARSE | HYBRID
CONFIG = {"model_type": "qwen3", "head_dim": 16, **SIZES}


def built(*, merge_qkv=False, tied=False, device="cpu", model_type="qwen3"):
    family = FAMILIES[model_type]
    read = {**CONFIG, **NEEDED.get(model_type, {}), "model_type": model_type}
    read["tie_word_embeddings"] = tied
    if model_type == "stablelm":  # its heads share the hidden size
        del read["head_dim"]
    config = family.read(read)
    with torch.device(device):
        return Decoder(config, merge_qkv=merge_qkv), family.weight_map(config, merge_qkv=merge_qkv)


def start(model, weights, seed=3):
    shapes, config = weights.hf_shapes(), weights.config
    model.load_state_dict(
        {
            name: from_hf(weights, name, lambda hf: initialize(hf, shapes[hf], seed, config))
            for name in weights.native_names()
        }
    )
    return model


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_model_built_without_memory_equals_one_built_with_it(tied):
    direct = start(*built(tied=tied))
    meta, weights = built(tied=tied, device="meta")
    assert all(parameter.is_meta for parameter in meta.parameters())
    assert not list(meta.buffers())
    later = start(meta.to_empty(device="cpu"), weights)
    ids, labels = documents()
    assert torch.equal(packed_loss(direct, ids, labels), packed_loss(later, ids, labels))


@pytest.mark.parametrize("merge_qkv", [False, True], ids=["split", "merged"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_matrix_has_a_role_and_a_grain(model_type, merge_qkv):
    model, weights = built(merge_qkv=merge_qkv, model_type=model_type, device="meta")
    roles = {
        name: find_parallel_style(name, FAMILIES[model_type].roles)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding | Router | Experts)
    }
    assert None not in roles.values(), roles
    sparse = (ParallelStyle.ROUTER, ParallelStyle.EXPERTS)
    whole = (*sparse, ParallelStyle.REPLICATED)
    linear = [name for name, role in roles.items() if role not in whole]
    stored = [hf for name in linear for hf in weights.hf_names(f"{name}.weight")]
    rows = {hf.removesuffix(".weight"): weights.hf_shapes()[hf][0] for hf in stored}
    layers = [weights.row_blocks(layer, count) for layer, count in rows.items()]
    for layer, blocks in zip(rows, layers, strict=True):
        assert weights.state_layer(layer) or all(map(shard_unit, blocks))
    assert [sum(blocks.values()) for blocks in layers] == [*rows.values()]
    experts = weights.config.experts
    count = len(experts.layers) if experts else 0
    gates = count if experts and experts.shared_gate else 0
    assert [list(roles.values()).count(role) for role in sparse] == [count + gates, count]
    assert roles["model.embed_tokens"] == ParallelStyle.VOCAB
    # What narrows is what writes into the residual stream.
    narrow = {name for name in linear if roles[name] is ParallelStyle.ROWWISE}
    assert narrow == {name for name in linear if name.endswith(("o_proj", "out_proj", "down_proj"))}


def test_fused_and_split_projections_start_as_the_same_model():
    split, fused = start(*built()), start(*built(merge_qkv=True))
    ids, _ = documents()
    torch.testing.assert_close(
        packed_logits(split, ids), packed_logits(fused, ids), atol=1e-6, rtol=1e-5
    )


def test_a_start_depends_on_seed_and_name_alone():
    _, weights = built()
    shapes, config = weights.hf_shapes(), weights.config
    name, other = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    torch.manual_seed(99)
    first = initialize(name, shapes[name], 7, config)
    torch.randn(5)
    assert torch.equal(first, initialize(name, shapes[name], 7, config))
    assert not torch.equal(first, initialize(other, shapes[other], 7, config))
    assert not torch.equal(first, initialize(name, shapes[name], 8, config))
    assert abs(first.std().item() / config.initializer_range - 1) < 0.05


# Nemotron's start there with the factor 2.
@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name != "nemotron"])
def test_norms_start_as_in_transformers(model_type):
    theirs = transformers.AutoConfig.for_model(model_type, **{**SIZES, **SHAPES[model_type]})
    model = transformers.AutoModelForCausalLM.from_config(theirs)
    config = FAMILIES[model_type].read(theirs.to_dict())
    norms = {n: w for n, w in model.state_dict().items() if n.endswith("norm.weight")}
    assert len(norms) >= {
        "olmo": 0,
        **dict.fromkeys(("cohere", "cohere2", "cohere2_moe"), 4),
        "nemotron_h": 6,
    }.get(model_type, 7)
    for name, tensor in norms.items():
        assert initialize(name, tensor.shape, 7, config).equal(tensor), name


def test_tied_weights_stay_one_through_every_move():
    model, _ = built(tied=True, device="meta")
    for moved in (
        model,
        model.to_empty(device="cpu"),
        model.bfloat16(),
        copy.deepcopy(model),
    ):
        table = moved.get_parameter("model.embed_tokens.weight")
        assert moved.get_parameter("lm_head.weight") is table
        assert "lm_head.weight" not in dict(moved.named_parameters())
        assert "lm_head.weight" not in moved.state_dict()


def test_a_model_in_bf16_keeps_its_angles_in_fp32():
    model, _ = built()
    at = torch.arange(50)
    before = model.rotary.angles(at, torch.float32)
    after = model.bfloat16().rotary.angles(at, torch.float32)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("socket", ["run_layer", "run_attn", "run_mlp"])
def test_recomputing_through_a_socket_changes_no_gradient(socket):
    plain = start(*built())
    recomputed = copy.deepcopy(plain)
    calls = []

    def run(module, *args):
        calls.append(module)
        return checkpoint(module, *args, use_reentrant=False)

    holders = [recomputed] if socket == "run_layer" else recomputed.model.layers.values()
    for holder in holders:
        setattr(holder, socket, run)
    ids, labels = documents()
    for model in (plain, recomputed):
        packed_loss(model, ids, labels).backward()
    assert len(calls) == SIZES["num_hidden_layers"]
    for one, other in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_attention_in_bf16_is_that_of_rounded_inputs_in_the_precision_they_came_in():
    q, k, v = torch.randn(3, 7, 2, 8, generator=torch.Generator().manual_seed(0)).unbind()
    segments, sinks = VarlenMetadata.of([4, 3]), torch.tensor([0.5, -1.0])
    got = in_bf16(attention)(q, k, v, segments, 0.3, 3, sinks)
    want = attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), segments, 0.3, 3, sinks)
    assert got.dtype == torch.float32
    assert torch.equal(got, want.float())


def test_a_document_beyond_the_learned_positions_is_refused_and_positions_begin_anew_in_each():
    model, _ = built(model_type="opt")
    table = model.model.embed_positions
    assert table is not None
    assert table.weight.shape == (64 + 2, 48)
    torch.nn.init.normal_(table.weight)
    at = torch.tensor([0, 1, 63, 0, 1])
    assert torch.equal(table(at), table.weight[at + 2])
    with pytest.raises(ValueError, match=r"more than 64 tokens, and the model learns 64 positions"):
        table(torch.tensor([0, 64]))
