import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from penstock.models.cost import matrix_parameters, pairs_per_token
from penstock.models.registry import family_of
from tests.dense import visible

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
}


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_token_costs_as_many_pairs_as_pytorch_counts(kind):
    if kind == "dense":
        hf = Qwen3Config(**SIZES)  # pyright: ignore[reportArgumentType]
        model = Qwen3ForCausalLM(hf)
    else:
        hf = Qwen3MoeConfig(**SIZES, **EXPERTS)  # pyright: ignore[reportArgumentType]
        model = Qwen3MoeForCausalLM(hf)
        model.set_experts_implementation("eager")
    model.set_attn_implementation("eager")

    def operations(length):
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, length, dtype=torch.int64), use_cache=False)
        return counter.get_total_flops()

    # Linear and quadratic parts, from two lengths; causal attention needs half of what is counted.
    one, two = operations(64), operations(128)
    quadratic = (two - 2 * one) / (2 * 64**2)
    linear = one / 64 - quadratic * 64
    assert pairs_per_token(family_of(hf.to_dict()).read(hf.to_dict())) == pytest.approx(
        linear / (quadratic / 2), abs=0.5
    )


def test_under_a_window_a_long_document_costs_what_its_tokens_see():
    hf = {"model_type": "qwen2", **SIZES, "max_position_embeddings": 64}
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    config = family_of(hf).read({**hf, **windows})
    features = config.num_attention_heads * config.head_dim

    def operations(length):
        pairs = sum(int(visible([length], config.window_of(layer)).sum()) for layer in range(3))
        return 6 * matrix_parameters(config) * length + 12 * features * pairs

    def cost(length):
        return pairs_per_token(config) * length + length**2

    assert cost(2000) / cost(500) == pytest.approx(operations(2000) / operations(500), rel=2e-3)
