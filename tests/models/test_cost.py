import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from penstock.models.cost import pairs_per_token
from penstock.models.families.qwen3 import read


def test_a_token_costs_as_many_pairs_as_pytorch_counts():
    hf = Qwen3Config(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
    )
    model = Qwen3ForCausalLM(hf)
    model.set_attn_implementation("eager")

    def operations(length):
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, length, dtype=torch.int64), use_cache=False)
        return counter.get_total_flops()

    # Linear and quadratic parts, from two lengths; causal attention needs half of what is counted.
    one, two = operations(64), operations(128)
    quadratic = (two - 2 * one) / (2 * 64**2)
    linear = one / 64 - quadratic * 64
    assert pairs_per_token(read(hf.to_dict())) == pytest.approx(linear / (quadratic / 2), abs=0.5)
