"""What config.json of the recipes' models says: only what sizes and layouts follow from."""

from typing import Any

ROPE = {"rope_type": "default", "rope_theta": 1e6}


def _dense(family: str, hidden: int, layers: int, heads: int, mlp: int, **more: Any) -> dict:
    return {
        "model_type": family,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": mlp,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": ROPE,
        "tie_word_embeddings": False,
        **more,
    }


def _qwen3(hidden: int, layers: int, heads: int, mlp: int, **more: Any) -> dict:
    return _dense("qwen3", hidden, layers, heads, mlp, vocab_size=151936, **more)


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": _qwen3(1024, 28, 16, 3072, tie_word_embeddings=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 36, 32, 9728, tie_word_embeddings=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 36, 32, 12288),
    "Qwen/Qwen3-14B": _qwen3(5120, 40, 40, 17408),
    "Qwen/Qwen3-32B": _qwen3(5120, 64, 64, 25600),
    "meta-llama/Llama-3.1-8B-Instruct": _dense("llama", 4096, 32, 32, 14336, vocab_size=128256),
    "meta-llama/Llama-3.3-70B-Instruct": _dense("llama", 8192, 80, 64, 28672, vocab_size=128256),
    "Qwen/Qwen3-30B-A3B": _dense(
        "qwen3_moe",
        2048,
        48,
        32,
        6144,
        vocab_size=151936,
        num_key_value_heads=4,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": _dense(
        "mixtral",
        4096,
        32,
        32,
        14336,
        vocab_size=32000,
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    # Its published weights, dequantized to bfloat16: docs/guide/models.md.
    "openai/gpt-oss-20b": _dense(
        "gpt_oss",
        2880,
        24,
        64,
        2880,
        vocab_size=201088,
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 12,
        attention_bias=True,
        swiglu_limit=7.0,
    ),
    "zai-org/GLM-4.5-Air": _dense(
        "glm4_moe",
        4096,
        46,
        96,
        10944,
        vocab_size=151552,
        moe_intermediate_size=1408,
        n_routed_experts=128,
        num_experts_per_tok=8,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        use_qk_norm=False,
        attention_bias=True,
        rope_parameters={**ROPE, "partial_rotary_factor": 0.5},
    ),
    "baidu/ERNIE-4.5-21B-A3B-PT": _dense(
        "ernie4_5_moe",
        2560,
        28,
        20,
        12288,
        vocab_size=103424,
        num_key_value_heads=4,
        moe_intermediate_size=1536,
        moe_num_experts=64,
        moe_k=6,
        moe_num_shared_experts=2,
        moe_layer_start_index=1,
        moe_layer_end_index=27,
        moe_layer_interval=1,
        use_bias=False,
        tie_word_embeddings=True,
    ),
}
"""By the `model_path` of a recipe."""

PARAMETERS: dict[str, float] = {
    "Qwen/Qwen3-0.6B": 0.6e9,
    "Qwen/Qwen3-4B": 4.0e9,
    "Qwen/Qwen3-8B": 8.2e9,
    "Qwen/Qwen3-14B": 14.8e9,
    "Qwen/Qwen3-32B": 32.8e9,
    "meta-llama/Llama-3.1-8B-Instruct": 8.03e9,
    "meta-llama/Llama-3.3-70B-Instruct": 70.6e9,
    "Qwen/Qwen3-30B-A3B": 30.5e9,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": 46.7e9,
    "openai/gpt-oss-20b": 20.9e9,
    "zai-org/GLM-4.5-Air": 107e9,
    "baidu/ERNIE-4.5-21B-A3B-PT": 21.8e9,
}
"""As the publishers count them: the check of the table above."""
