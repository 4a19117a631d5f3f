import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from penstock.models.flops import (
    TrainableParams,
    Work,
    forward_flops,
    layer_flops,
    pairs_per_token,
    step_flops,
)
from penstock.models.registry import get_family
from tests.dense import visible
from tests.engine import runs
from tests.engine.inputs import MODELS, SHAPE

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "mlp_only_layers": [1],
    "shared_expert_intermediate_size": 56,
}
LATENT = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "head_dim": 8,
}
UNGATED = {
    "layers_block_type": ["moe", "full_attention", "mlp"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
    "moe_latent_size": 48,
}
SPARSE = {
    "latent attention": (DeepseekV3Config, DeepseekV3ForCausalLM, LATENT),
    "experts": (Qwen3MoeConfig, Qwen3MoeForCausalLM, EXPERTS),
    "shared experts": (Qwen2MoeConfig, Qwen2MoeForCausalLM, EXPERTS),
    "latent experts without a gate": (NemotronHConfig, NemotronHForCausalLM, UNGATED),
}
LENGTH, KEPT = 48, 20


def built(kind):
    """A model of transformers, whose attention compares every pair of tokens, and our config."""
    if kind == "dense":
        hf = Qwen3Config(**SIZES)  # pyright: ignore[reportArgumentType]
        model = Qwen3ForCausalLM(hf)
    else:
        of, model_of, more = SPARSE[kind]
        hf = of(**{**SIZES, **more})
        model = model_of(hf)
        model.set_experts_implementation("eager")
    model.set_attn_implementation("eager")
    return model, get_family(hf.to_dict()).read(hf.to_dict())


def counted(model, length=LENGTH):
    """Operations of a forward pass, and of it with its backward pass, as PyTorch counts them; the
    logits of the last tokens alone are computed."""
    rows = torch.randn(1, length, SIZES["hidden_size"], requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        logits = model(inputs_embeds=rows, use_cache=False, logits_to_keep=KEPT).logits
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    return forward.get_total_flops(), forward.get_total_flops() + backward.get_total_flops()


def as_eager(length=LENGTH):
    """What eager attention computes: the pairs of the future as well."""
    return Work(length, attention_pairs=length**2, local_pairs=0, logits=KEPT)


@pytest.mark.parametrize("kind", ["dense", *SPARSE])
def test_a_step_costs_what_pytorch_counts(kind):
    model, config = built(kind)
    forward, step = counted(model)
    assert forward_flops(config, as_eager()) == forward
    assert step_flops(config, as_eager()) == step


def test_a_layer_that_predicts_further_tokens_costs_its_block_a_projection_and_a_head():
    theirs = DeepseekV3Config(**{**SIZES, **LATENT})  # pyright: ignore[reportArgumentType]
    hf = {**theirs.to_dict(), "num_nextn_predict_layers": 1}
    family = get_family(hf)
    own, with_mtp = (family.trained_config(hf, mtp=mtp) for mtp in (False, True))
    longer = family.read({**hf, "num_hidden_layers": SIZES["num_hidden_layers"] + 1})
    width = SIZES["hidden_size"]
    more = 2 * LENGTH * 2 * width * width + 2 * KEPT * width * SIZES["vocab_size"]
    found = [forward_flops(config, as_eager()) for config in (own, longer, with_mtp)]
    assert found[0] < found[1]
    assert found[2] == found[1] + more


class _Adapted(nn.Module):
    def __init__(self, base, rank):
        super().__init__()
        self.base = base
        self.factors = nn.Sequential(
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )

    def forward(self, x):
        return self.base(x) + self.factors(x)


def test_frozen_matrices_cost_two_products_and_their_adapters_three():
    model, config = built("dense")
    model.requires_grad_(False)
    rank, inner = 4, 0
    for number in range(SIZES["num_hidden_layers"]):
        name = f"model.layers.{number}.mlp.up_proj"
        model.set_submodule(name, _Adapted(model.get_submodule(name), rank))
        inner += rank * (SIZES["hidden_size"] + SIZES["intermediate_size"])
    model.set_submodule("lm_head", _Adapted(model.lm_head, rank))
    head = rank * (SIZES["hidden_size"] + SIZES["vocab_size"])
    _, step = counted(model)
    learning = TrainableParams("frozen", inner + head, head)
    assert step_flops(config, as_eager(), learning=learning) == step


@pytest.mark.parametrize("kind", ["linear attention", "gemma 4", "llama 4", "latent attention"])
def test_layers_cost_what_a_forward_pass_costs_without_the_head(kind):
    hf = {**runs.TINY, **SHAPE, **MODELS[kind]}
    config = get_family(hf).read(hf)
    each = layer_flops(config, 100)
    assert sum(each) == forward_flops(config, Work.from_lengths(config, [100], logits=0))
    assert len(set(each)) > 1


def test_parts_that_are_computed_again_cost_what_they_cost_alone():
    model, config = built("experts")
    forward, _ = counted(model)
    parts = [forward_flops(config, as_eager(), parts=[part]) for part in ("attention", "network")]
    head = 2 * KEPT * SIZES["hidden_size"] * SIZES["vocab_size"]
    assert sum(parts) == forward - head


@pytest.mark.parametrize("window", [None, 8])
def test_documents_are_compared_with_themselves_alone(window):
    hf = {"model_type": "qwen2", **SIZES, "max_position_embeddings": 64}
    windows = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}
    config = get_family(hf).read({**hf, **windows} if window else hf)
    lengths = [1, 7, 8, 9, 30]
    work = Work.from_lengths(config, lengths)
    assert work.tokens == work.logits == sum(lengths)
    assert work.attention_pairs == visible(lengths).sum()
    assert work.local_pairs == (visible(lengths, window).sum() if window else 0)
    assert work == Work.from_lengths(config, lengths[:2]) + Work.from_lengths(config, lengths[2:])
    sums = Work.from_totals(config, sum(lengths), sum(n**2 for n in lengths))
    assert sums.attention_pairs == work.attention_pairs
    assert 0 <= sums.local_pairs - work.local_pairs <= len(lengths) * (window or 0) ** 2 / 2


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_token_costs_as_many_pairs_as_pytorch_counts(kind):
    model, config = built(kind)
    # Linear and quadratic parts, from two lengths; causal attention needs half of what is counted.
    head = 2 * SIZES["hidden_size"] * SIZES["vocab_size"]
    one, two = (counted(model, length)[0] - KEPT * head for length in (64, 128))
    quadratic = (two - 2 * one) / (2 * 64**2)
    linear = one / 64 - quadratic * 64 + head
    assert pairs_per_token(config) == pytest.approx(linear / (quadratic / 2), abs=0.5)


def test_under_a_window_a_long_document_costs_what_its_tokens_see():
    hf = {"model_type": "qwen2", **SIZES, "max_position_embeddings": 64}
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    config = get_family(hf).read({**hf, **windows})

    def operations(length):
        return step_flops(config, Work.from_lengths(config, [length]))

    def cost(length):
        return pairs_per_token(config) * length + length**2

    assert cost(2000) / cost(500) == pytest.approx(operations(2000) / operations(500), rel=2e-3)


def test_sparse_attention_counts_the_selected_keys_and_the_indexer_without_a_backward_pass():
    whole = {"vocab_size": 300, "max_position_embeddings": 512, **SIZES, **LATENT}
    dense = get_family({"model_type": "deepseek_v3", **whole}).read(whole)
    indexed = {**whole, "index_topk": 10, "index_n_heads": 5, "index_head_dim": 16}
    sparse = get_family({"model_type": "deepseek_v32", **indexed}).read(indexed)
    lengths = [LENGTH, 7, 100]
    every, some = (Work.from_lengths(config, lengths) for config in (dense, sparse))
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    selected = sum(min(10, place) for length in lengths for place in range(1, length + 1))
    assert (some.attention_pairs, some.local_pairs) == (pairs, selected)
    per_pair = SIZES["num_attention_heads"] * (12 + 8 + 10)
    matrices = 40 * 5 * 16 + 64 * 16 + 64 * 5
    saved = 2 * 3 * per_pair * (pairs - selected)
    index = 2 * 3 * (matrices * sum(lengths) + 5 * 16 * pairs)
    assert forward_flops(sparse, some) == forward_flops(dense, every) - saved + index
    assert step_flops(sparse, some) == step_flops(dense, every) - 3 * saved + index
    assert pairs_per_token(sparse) > pairs_per_token(dense)
