"""What several modules of whole runs start from."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.rows.tokenizer import byte_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny Llama with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
