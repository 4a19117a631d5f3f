"""Runs whose memory is predicted and measured: what takes it differs from one to the next."""

from collections.abc import Mapping
from typing import Any

LONG = [1024, 512, 512]
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
MANY = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128}

Case = Mapping[str, Any]

CASES: Mapping[str, Case] = {
    "activations": {"lengths": LONG},
    "recomputed": {"lengths": LONG, "enable_gradient_checkpointing": True},
    "recomputed in full precision": {
        "lengths": LONG,
        "enable_gradient_checkpointing": True,
        "enable_mixed_precision": False,
    },
    "full precision": {"lengths": LONG, "enable_mixed_precision": False},
    "whole weights": {"lengths": LONG, "data_parallel_mode": "none"},
    "a large vocabulary": {"lengths": [256, 256], "hf": {"vocab_size": 32_768}},
    "adapters": {"lengths": LONG, "lora": {"enable_lora": True}},
    "experts": {"lengths": [512, 256, 256], "hf": EXPERTS},
    "experts in full precision": {
        "lengths": [512, 256, 256],
        "hf": EXPERTS,
        "enable_mixed_precision": False,
    },
    "many experts, recomputed": {
        "lengths": LONG,
        "hf": {**EXPERTS, **MANY},
        "enable_gradient_checkpointing": True,
    },
    "divided experts": {
        "world": 2,
        "lengths": [512, 512],
        "hf": EXPERTS,
        "expert_parallel_size": 2,
    },
    "norms around layers, in full precision": {
        "lengths": LONG,
        "hf": {
            "model_type": "gemma3_text",
            "sliding_window": 256,
            "pad_token_id": None,
            "rope_parameters": {"full_attention": {"rope_theta": 1e6}},
        },
        "enable_mixed_precision": False,
    },
    "fused layers, in full precision": {
        "lengths": LONG,
        "hf": {"model_type": "phi3", "pad_token_id": None},
        "enable_mixed_precision": False,
    },
    "norms of outputs, in full precision": {
        "lengths": LONG,
        "hf": {"model_type": "olmo2", "pad_token_id": None},
        "enable_mixed_precision": False,
    },
    "latent attention, in full precision": {
        "lengths": LONG,
        "hf": {
            "model_type": "youtu",
            "num_key_value_heads": 6,
            "head_dim": None,
            "q_lora_rank": 256,
            "kv_lora_rank": 128,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
        },
        "enable_mixed_precision": False,
    },
    "transformers' code, in full precision": {
        "lengths": [512, 256, 256],
        "hf": {
            "model_type": "gpt2",
            "num_attention_heads": 4,
            "n_inner": 1536,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
        "model": {"backend": "transformers"},
        "enable_mixed_precision": False,
    },
    "transformers' experts, in full precision": {
        "lengths": [512, 256, 256],
        "hf": {
            "model_type": "deepseek_v3",
            "head_dim": 32,
            "kv_lora_rank": 64,
            "q_lora_rank": 128,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 32,
            "v_head_dim": 64,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 6,
        },
        "model": {"backend": "transformers"},
        "enable_mixed_precision": False,
    },
    "linear attention, in full precision": {
        "lengths": LONG,
        "hf": {
            "model_type": "qwen3_5_text",
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "pad_token_id": None,
        },
        "enable_mixed_precision": False,
    },
    "sharded": {"world": 2, "lengths": [512, 512]},
    "split matrices": {"world": 2, "lengths": [512, 512], "tensor_parallel_size": 2},
}
"""Settings of `train`, but for: documents of a row, what is other about the model, ranks, and the
section `lora`."""

QUICK = ("recomputed in full precision", "experts in full precision")
"""On processors without bfloat16 units the others take minutes, and torch's scratch is another."""
