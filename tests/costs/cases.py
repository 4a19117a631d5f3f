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
    "sparse attention, in full precision": {
        "lengths": [768, 1280],
        "hf": {
            "model_type": "deepseek_v32",
            "num_key_value_heads": 6,
            "q_lora_rank": 256,
            "kv_lora_rank": 128,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "head_dim": 32,
            "v_head_dim": 64,
            "index_topk": 512,
            "index_n_heads": 4,
            "index_head_dim": 64,
            "first_k_dense_replace": 4,
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
    "mamba, in full precision": {
        "lengths": LONG,
        "hf": {
            "model_type": "bamba",
            "attn_layer_indices": [3],
            "mamba_n_heads": 8,
            "mamba_n_groups": 1,
            "mamba_d_state": 64,
            "pad_token_id": None,
            "rope_parameters": {"rope_theta": 1e4},
        },
        "enable_mixed_precision": False,
    },
    "layers of one part, in full precision": {
        "lengths": LONG,
        "hf": {
            "model_type": "nemotron_h",
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
            "mamba_num_heads": 12,
            "mamba_head_dim": 64,
            "n_groups": 2,
            "ssm_state_size": 64,
            "pad_token_id": None,
        },
        "enable_mixed_precision": False,
    },
    "latent experts without a gate, in full precision": {
        "lengths": [512, 256, 256],
        "hf": {
            "model_type": "nemotron_h",
            "layers_block_type": ["moe", "full_attention", "moe", "mlp"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 512,
            "moe_shared_expert_intermediate_size": 256,
            "moe_latent_size": 128,
            "pad_token_id": None,
        },
        "enable_mixed_precision": False,
    },
    "channel linear attention, in full precision": {
        "lengths": LONG,
        "hf": {
            "model_type": "kimi_linear",
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "mlp_layer_types": ["dense"] * 4,
            "linear_num_heads": 6,
            "linear_head_dim": 64,
            "q_lora_rank": None,
            "kv_lora_rank": 96,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
            "num_key_value_heads": 6,
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        },
        "enable_mixed_precision": False,
    },
    "convolutions, in full precision": {
        "lengths": LONG,
        "hf": {
            "model_type": "lfm2",
            "layer_types": ["conv"] * 3 + ["full_attention"],
            "block_auto_adjust_ff_dim": False,
            "pad_token_id": None,
        },
        "enable_mixed_precision": False,
    },
    "sharded": {"world": 2, "lengths": [512, 512]},
    "split matrices": {"world": 2, "lengths": [512, 512], "tensor_parallel_size": 2},
}
"""Settings of `train`, but for: documents of a row, what is other about the model, ranks, and the
section `lora`."""

QUICK = ("experts in full precision",)
"""On processors without bfloat16 units the others take minutes, and torch's scratch is another."""
