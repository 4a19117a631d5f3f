"""What layouts are tried on: small models with random weights, and rows to train them on.

Rows hold documents of one token, of prime lengths, and longer than any rank's share.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.rows.schema import packed_schema
from tests.engine import runs

DOCUMENTS = (
    [1, 2, 3, 5, 7, 11, 13, 17, 1],
    [97],
    [1],
    [31, 1, 41],
    [2, 83],
    [19, 23, 29],
    [1, 1, 1, 53],
    [61, 37, 1],
)
"""Lengths of the documents in a row; a rank's share of one is at most half of it."""

ALTERNATING = ["sliding_attention", "full_attention"] * 2
BY_LAYER = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
"""RoPE of each kind of layer."""

LINEAR_ATTENTION: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "rms_norm_eps": 1e-3,  # outputs near 0 are not enlarged to full size, with their rounding
    "pad_token_id": None,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}

MODELS: Mapping[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "two key heads": {"tie_word_embeddings": True, "num_key_value_heads": 2},
    "broad": {"tie_word_embeddings": False, "intermediate_size": 64},
    "experts": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "tie_word_embeddings": False,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "gated experts": {
        "model_type": "qwen2_moe",
        "architectures": ["Qwen2MoeForCausalLM"],
        "tie_word_embeddings": False,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 24,
        "mlp_only_layers": [1],
    },
    "dots1": {
        "model_type": "dots1",
        "architectures": ["Dots1ForCausalLM"],
        "tie_word_embeddings": False,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
    "granitemoe": {
        "model_type": "granitemoe",
        "architectures": ["GraniteMoeForCausalLM"],
        "tie_word_embeddings": True,
        "intermediate_size": 20,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 12.0,
        "logits_scaling": 0.7,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.3,
    },
    # One expert per token, which scales its input; attention in chunks, RoPE in all layers but one.
    "llama 4": {
        "model_type": "llama4_text",
        "architectures": ["Llama4ForCausalLM"],
        "tie_word_embeddings": False,
        "intermediate_size": 20,
        "intermediate_size_mlp": 40,
        "num_local_experts": 8,
        "moe_layers": [1, 3],
        "no_rope_layers": [1, 1, 0, 1],
        "attention_chunk_size": 12,
        "floor_scale": 8,
        "pad_token_id": None,
    },
    "minimax_m2": {
        "model_type": "minimax_m2",
        "architectures": ["MiniMaxM2ForCausalLM"],
        "tie_word_embeddings": False,
        "intermediate_size": 20,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "hunyuan_v1_moe": {
        "model_type": "hunyuan_v1_moe",
        "architectures": ["HunYuanMoEV1ForCausalLM"],
        "tie_word_embeddings": True,
        "intermediate_size": 20,
        "num_experts": 8,
        "moe_topk": 2,
    },
    "olmoe": {
        "model_type": "olmoe",
        "architectures": ["OlmoeForCausalLM"],
        "tie_word_embeddings": False,
        "intermediate_size": 20,
        "head_dim": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "sinks": {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "tie_word_embeddings": False,
        "attention_bias": True,
        "intermediate_size": 20,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 20,
    },
    # LayerNorm, a share of each head turned, no gate, a bias on every matrix.
    "layer norms": {
        "model_type": "nemotron",
        "architectures": ["NemotronForCausalLM"],
        "tie_word_embeddings": False,
        "hidden_act": "gelu",
        "attention_bias": True,
        "mlp_bias": True,
        "norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "learned positions": {
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        "tie_word_embeddings": True,
        "activation_function": "gelu",
        "ffn_dim": 48,
        "dropout": 0.0,
        # Of a padding token transformers would leave the embedding as it is.
        "pad_token_id": None,
        # Of keys that do not turn a bias changes nothing, and its gradient is what rounding leaves.
        "enable_bias": False,
    },
    # Norms of outputs instead of inputs, QK norm over all heads, windows with their own RoPE.
    "output norms": {
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "num_key_value_heads": 2,
        "rope_parameters": BY_LAYER,
        "layer_types": ALTERNATING,
        "sliding_window": 20,
    },
    # q, k and v are one layer in checkpoints, and gate and up; a share of each head turned.
    "fused layers": {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "intermediate_size": 64,
        "tie_word_embeddings": False,
        "num_key_value_heads": 2,
        "pad_token_id": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    # RMSNorm with 1 + weight, norms around each layer, scores and logits with soft caps.
    "soft caps": {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "sliding_window": 20,
        "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "pad_token_id": None,
    },
    "gemma 3": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": 20,
        "layer_types": ALTERNATING,
        "rope_parameters": BY_LAYER,
        "pad_token_id": None,
    },
    # Layers with full attention have wider heads, one key head for all, which is the values too.
    "gemma 4": {
        "model_type": "gemma4_text",
        "architectures": ["Gemma4ForCausalLM"],
        "sliding_window": 20,
        "layer_types": [*ALTERNATING],
        "rope_parameters": BY_LAYER,
        "global_head_dim": 24,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 1,
        "pad_token_id": None,
    },
    # Attention and MLP side by side, LayerNorm without bias; no RoPE in layers without a window.
    "parallel blocks": {
        "model_type": "cohere2",
        "architectures": ["Cohere2ForCausalLM"],
        "sliding_window": 20,
        "layer_types": ALTERNATING,
        "logit_scale": 0.5,
        "pad_token_id": None,
    },
    # Attention sinks in a dense model; windows with RoPE, and full attention without.
    "dense sinks": {
        "model_type": "granite_swa",
        "architectures": ["GraniteSWAForCausalLM"],
        "sliding_window": 20,
        "layer_types": ALTERNATING,
        "layer_rope_theta": [100.0, 0, 100.0, 0],
        "attention_multiplier": 0.2,
    },
    "cohere2_moe": {
        "model_type": "cohere2_moe",
        "architectures": ["Cohere2MoeForCausalLM"],
        "tie_word_embeddings": False,
        "intermediate_size": 20,
        "prefix_dense_intermediate_size": 40,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "num_experts": 8,
        "num_shared_experts": 1,
        "shared_expert_combination_strategy": "sum",
        "sliding_window": 20,
        "layer_types": ALTERNATING,
        "pad_token_id": None,
    },
    "scales": {
        "model_type": "granite",
        "architectures": ["GraniteForCausalLM"],
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "logits_scaling": 0.3,
    },
    # Queries are scaled by their position, and some layers turn nothing.
    "query scales": {
        "model_type": "ministral3",
        "architectures": ["Ministral3ForCausalLM"],
        "pad_token_id": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.5,
        },
    },
    # Keys and values of all heads from a latent vector; experts in groups, and shared ones.
    "latent attention": {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "tie_word_embeddings": False,
        "num_key_value_heads": 8,
        "head_dim": None,
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
    },
    # Tokens attend to those that an indexer selects.
    "sparse attention": {
        "model_type": "deepseek_v32",
        "architectures": ["DeepseekV32ForCausalLM"],
        "tie_word_embeddings": False,
        "num_key_value_heads": 8,
        "head_dim": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "index_topk": 6,
        "index_n_heads": 12,
        "index_head_dim": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
    },
    "dense latent attention": {
        "model_type": "youtu",
        "architectures": ["YoutuForCausalLM"],
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "intermediate_size": 64,
        "num_key_value_heads": 8,
        "head_dim": None,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
    # Layers with states, whose projections have the rows of each key head together.
    "linear attention": {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "tie_word_embeddings": False,
        **LINEAR_ATTENTION,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 24,
        "mlp_only_layers": [1],
    },
    "dense linear attention": {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "tie_word_embeddings": False,
        "intermediate_size": 64,
        **LINEAR_ATTENTION,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    # Layers of their own for queries, keys and values, and norms by kind of layer.
    "separate linear attention": {
        "model_type": "olmo_hybrid",
        "architectures": ["OlmoHybridForCausalLM"],
        "tie_word_embeddings": False,
        "intermediate_size": 64,
        **LINEAR_ATTENTION,
        "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    # Mamba-2 with more ranks than groups of B and C; an MLP beside experts.
    "mamba": {
        "model_type": "granitemoehybrid",
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "tie_word_embeddings": True,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "intermediate_size": 20,
        "shared_intermediate_size": 24,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 4,
        "mamba_n_heads": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 6,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.3,
        "pad_token_id": None,
    },
    # An MLP with names of its own in every layer, and biases; as many groups as heads of keys.
    "dense mamba": {
        "model_type": "bamba",
        "architectures": ["BambaForCausalLM"],
        "tie_word_embeddings": False,
        "intermediate_size": 64,
        "attn_layer_indices": [1, 3],
        "head_dim": 4,
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 6,
        "mamba_proj_bias": True,
        "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
    # Each layer is a token mixer, or an MLP without a gate.
    "layers of one part": {
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        "tie_word_embeddings": False,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 6,
        "n_groups": 4,
        "ssm_state_size": 6,
        "pad_token_id": None,
    },
    # Experts of the same kind, of fewer features than the residual stream.
    "experts without a gate": {
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        "tie_word_embeddings": False,
        "num_hidden_layers": 4,
        "layers_block_type": ["moe", "linear_attention", "full_attention", "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 6,
        "n_groups": 4,
        "ssm_state_size": 6,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 20,
        "moe_latent_size": 16,
        "pad_token_id": None,
    },
    # Decays of channels, and latent attention without RoPE.
    "channel linear attention": {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "tie_word_embeddings": False,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "rms_norm_eps": 1e-3,
        "num_key_value_heads": 8,
        "head_dim": None,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "moe_intermediate_size": 20,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    },
    # Gated channels, convolved; names of their own for all layers.
    "convolutions": {
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        "tie_word_embeddings": False,
        "intermediate_size": 64,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention"] * 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "pad_token_id": None,
    },
    "convolutions and experts": {
        "model_type": "lfm2_moe",
        "architectures": ["Lfm2MoeForCausalLM"],
        "tie_word_embeddings": False,
        "layer_types": ["conv", "full_attention"] * 2,
        "pad_token_id": None,
        "num_dense_layers": 1,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
    },
}
SHAPE = {
    "vocab_size": runs.VOCAB + 11,  # a prime: no two ranks hold as much of it
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def write_model(folder: Path, kind: str) -> None:
    """The weights of this kind, unless they are there."""
    if not (folder / kind).is_dir():
        runs.write_model(folder / kind, noise=0.1, **{**SHAPE, **MODELS[kind]})


def write_rows(
    folder: Path,
    num_rows: int,
    *,
    is_weighted: bool = False,
    documents: Sequence[Sequence[int]] = DOCUMENTS,
) -> None:
    """Rows of these documents in turn, most of whose tokens are trained; with loss weights, those
    of a row are far larger than those of the next."""
    rng = np.random.default_rng(0)
    rows: dict[str, list[Any]] = {"input_ids": [], "labels": [], "lengths": []}
    for number in range(num_rows):
        lengths = documents[number % len(documents)]
        ids = rng.integers(0, runs.VOCAB, size=sum(lengths))
        labels = np.where(rng.random(len(ids)) < 0.8, np.roll(ids, -1), -100)
        labels[np.cumsum(lengths) - 1] = -100
        rows["input_ids"].append(ids.tolist())
        rows["labels"].append(labels.tolist())
        rows["lengths"].append(lengths)
        if is_weighted:
            weights = (0.1, 1, 20)[number % 3] * rng.random(len(ids)) + 0.01
            rows.setdefault("loss_weights", []).append(np.where(labels == -100, 0, weights))
    train = folder / "data" / "train"
    train.mkdir(parents=True)
    schema = packed_schema("sft", is_weighted=is_weighted)
    with pa.ipc.new_file(str(train / "rows-00000-of-00001.arrow"), schema) as writer:
        writer.write_table(pa.table(rows, schema=schema))


BASES: Mapping[str, dict[str, Any]] = {
    "dense": {"attention_bias": True, "tie_word_embeddings": False},
    "experts": {**MODELS["experts"], "mlp_only_layers": []},
    "experts without a gate": MODELS["experts without a gate"],
    "gated experts": MODELS["gated experts"],
    "granitemoe": MODELS["granitemoe"],
    "sinks": MODELS["sinks"],
}
"""Models to put adapters on."""


def write_bases(folder: Path) -> None:
    """A folder of random weights for each of BASES."""
    for name, changes in BASES.items():
        runs.write_model(folder / name, **changes)
