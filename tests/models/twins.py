"""Pairs of models with the same weights: transformers' and ours."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from penstock.losses.cross_entropy import Loss, sum_cross_entropy
from penstock.models.decoder import Decoder
from penstock.models.family import Family
from penstock.models.registry import get_family
from penstock.models.weights import WeightMap
from penstock_kernels.attention import VarlenMetadata
from penstock_kernels.cross_entropy import LossOptions
from tests.models.stored import from_hf, of_ernie_vl, published

SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES = {
    "llama": {"rope_parameters": LLAMA3_ROPE, "rms_norm_eps": 1e-5},
    "llama-biased": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "qwen2-windows": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    # The gradient of keys' biases is what turning leaves of it: little, if it is slow.
    "ernie4_5": {
        "head_dim": 16,
        "use_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
}
# What Megatron's models are made of: norms, positions, activations and biases of either kind.
FAST = {"rope_type": "default", "rope_theta": 100.0}
SHARE = {**FAST, "partial_rotary_factor": 0.5}
FAMILIES |= {
    "arcee": {"hidden_act": "gelu", "rope_parameters": FAST},
    "arcee-biased": {"attention_bias": True, "mlp_bias": True, "rope_parameters": FAST},
    "jais2": {"hidden_act": "gelu", "rope_parameters": FAST},
    "jais2-unbiased": {"attention_bias": False, "mlp_bias": False, "rope_parameters": FAST},
    "nemotron": {"head_dim": 16, "hidden_act": "gelu", "rope_parameters": SHARE},
    "nemotron-biased": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 6},
    "stablelm": {"rope_parameters": SHARE},
    "stablelm-biased": {"use_qkv_bias": True},
    "opt": {"ffn_dim": 80, "activation_function": "gelu", "dropout": 0.0, "num_key_value_heads": 6},
    "opt-unbiased": {"ffn_dim": 72, "dropout": 0.0, "enable_bias": False},
    "glm4_moe-dense": {
        "head_dim": 16,
        "first_k_dense_replace": 3,
        "use_qk_norm": False,
        "rope_parameters": SHARE,
        "num_mtp_layers": 0,
    },
}
# Where norms are, what they are of, and what is scaled or capped.
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2}
WINDOWS["layer_types"] = WINDOWS["layer_types"][: SIZES["num_hidden_layers"]]
BY_KIND = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e3, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1],
    "long_factor": [1.0, 4.0],
    "partial_rotary_factor": 0.5,
}
FAMILIES |= {
    "mistral": {"sliding_window": 6},
    "ministral": {**WINDOWS, "head_dim": 16},
    "ministral3": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "phi3": {"sliding_window": 6, "pad_token_id": None},
    "phi3-long": {
        "rope_parameters": LONG_ROPE,
        "original_max_position_embeddings": 10,
        "pad_token_id": None,
    },
    "smollm3": {"no_rope_layers": [1, 0, 1], "pad_token_id": None},
    "olmo2": {},
    "olmo3": {**WINDOWS, "rope_parameters": BY_KIND},
    "granite": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.2,
        "logits_scaling": 3.0,
    },
    "glm": {"head_dim": 16, "pad_token_id": None},
    "glm4": {"head_dim": 16, "attention_bias": False, "pad_token_id": None},
    "seed_oss": {
        "head_dim": 16,
        "attention_out_bias": True,
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
        "rope_parameters": FAST,
    },
    "gemma": {"head_dim": 16},
    "gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 6,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {**WINDOWS, "head_dim": 16, "rope_parameters": BY_KIND},
    "gemma4_text": {
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "head_dim": 16,
        "global_head_dim": 32,
        "final_logit_softcapping": 3.0,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 1,
        "pad_token_id": None,
    },
    "gemma4_text-shared": {
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "head_dim": 16,
        "global_head_dim": 24,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 1,
        "pad_token_id": None,
        "rope_parameters": BY_KIND,
    },
    "exaone4": {**WINDOWS, "head_dim": 16},
    "hyperclovax": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.2,
        "logits_scaling": 0.3,
    },
    "vaultgemma": {
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 6,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "cohere": {"rope_parameters": FAST, "attention_bias": True, "pad_token_id": None},
    "cohere2": {**WINDOWS, "pad_token_id": None, "logit_scale": 0.5},
    "granite_swa": {
        **WINDOWS,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.2,
        "logits_scaling": 3.0,
        "layer_rope_theta": [100.0, 0, 100.0],
    },
    "olmo": {"pad_token_id": None},
    "helium": {"head_dim": 8, "pad_token_id": None},
    "cwm": {**WINDOWS, "head_dim": 16, "rope_parameters": LLAMA3_ROPE},
    "internlm3": {
        "head_dim": 16,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": FAST,
        "pad_token_id": None,
    },
    "iquestcoder": {"head_dim": 16},
    "hunyuan_v1_dense": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 1e4,
            "alpha": 50.0,
            "factor": 1.0,
        },
    },
}
SPARSE = {
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 2,
        "mlp_only_layers": [1],
        "rope_parameters": FAST,
    },
    "mixtral": {
        "intermediate_size": 32,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
    },
    "glm4_moe": {
        "head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        "use_qk_norm": True,
        "attention_bias": True,
        "num_mtp_layers": 0,
    },
    "granitemoe": {
        "intermediate_size": 24,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "embedding_multiplier": 12.0,
        "logits_scaling": 6.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.2,
    },
    "minimax_m2": {
        "head_dim": 16,
        "intermediate_size": 24,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "rotary_dim": 8,
        "rope_parameters": {**FAST},  # to which transformers adds the share
    },
    "hunyuan_v1_moe": {
        "head_dim": 16,
        "intermediate_size": 24,
        "num_experts": 8,
        "moe_topk": 3,
        "rope_parameters": FAST,
    },
    "olmoe": {
        "intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "attention_bias": True,
        "rope_parameters": FAST,
    },
    "dots1": {
        "head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.7,
        "first_k_dense_replace": 1,
        "sliding_window": 5,
        "max_window_layers": 2,
    },
    "cohere2_moe": {
        **WINDOWS,
        "head_dim": 16,
        "intermediate_size": 24,
        "prefix_dense_intermediate_size": 40,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "shared_expert_combination_strategy": "sum",
        "pad_token_id": None,
    },
    "exaone_moe": {
        **WINDOWS,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_group": 4,
        "topk_group": 2,
        "pad_token_id": None,
    },
    "flex_olmo": {
        "intermediate_size": 24,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "pad_token_id": None,
    },
    "hy_v3": {
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
    },
    "llama4_text": {
        "head_dim": 16,
        "intermediate_size": 24,
        "intermediate_size_mlp": 40,
        "num_local_experts": 8,
        "moe_layers": [0, 2],
        "no_rope_layers": [1, 0, 1],
        "attention_chunk_size": 6,
        "floor_scale": 4,
        "pad_token_id": None,
        "rope_parameters": FAST,
    },
    "mellum": {
        **WINDOWS,
        "head_dim": 16,
        "rope_parameters": BY_KIND,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
    },
    "solar_open": {
        "head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
    },
    "gpt_oss": {
        "head_dim": 16,
        "intermediate_size": 24,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "sliding_window": 5,
        "swiglu_limit": 0.4,  # so low that gates and what they gate are clamped
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    },
}
MLA = {
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}
ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
# Few enough keys that even short documents have more; many heads, so that scores are rarely equal.
INDEXED = {"index_topk": 5, "index_n_heads": 12, "index_head_dim": 14}
# Latent attention: a head's features with RoPE and without, and its values, differ in number.
LATENT = {
    "minicpm3": MLA,
    # Values wider than keys, and queries without a latent vector.
    "youtu": {**MLA, "q_lora_rank": None, "v_head_dim": 24, "attention_bias": True},
    "youtu-halves": {**MLA, "rope_interleave": False, "rope_parameters": YARN},
}
FAMILIES |= LATENT
SPARSE |= {
    "deepseek_v3": {
        **MLA,
        **ROUTED,
        "n_shared_experts": 2,
        "rope_parameters": YARN,
        "routed_scaling_factor": 1.7,
        "attention_bias": True,
    },
    "deepseek_v2": {
        **MLA,
        **ROUTED,
        "n_routed_experts": 16,
        "topk_group": 1,
        "topk_method": "group_limited_greedy",
        "mlp_bias": True,
        "rope_parameters": YARN,
    },
    "glm4_moe_lite": {**MLA, **ROUTED, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    "deepseek_v32": {**MLA, **ROUTED, **INDEXED, "rope_parameters": YARN},
    "glm_moe_dsa": {**MLA, **ROUTED, **INDEXED, "attention_bias": True},
}
"""Families with experts: some layers dense, and sizes that PyTorch's grouped product takes."""
VARIANTS = {
    "deepseek_v2-greedy": {**MLA, **ROUTED, "q_lora_rank": None, "n_group": None},
    "deepseek_v3-dense": {**MLA, "first_k_dense_replace": 3, "q_lora_rank": None},
}
"""Further settings of families with experts."""
GATED_DELTA = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    # Outputs near 0, such as those of a query across its key, are not enlarged to full size.
    "rms_norm_eps": 1e-3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "rope_parameters": {**FAST, "partial_rotary_factor": 0.5},
    "pad_token_id": None,
}
GATED_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
CONVOLUTIONS = {
    "layer_types": ["conv", "full_attention", "conv"],
    "rope_parameters": FAST,
    "pad_token_id": None,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 10,
    "mamba_chunk_size": 32,
    "time_step_limit": [0.05, 2.0],
    "pad_token_id": None,
}
GRANITE4 = {
    **MAMBA,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 40,
    "embedding_multiplier": 12.0,
    "logits_scaling": 6.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.2,
}
NEMOTRON_H = {
    "head_dim": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 6,
    "n_groups": 2,
    "ssm_state_size": 10,
    "chunk_size": 32,
    "time_step_min": 0.05,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 20,
    "pad_token_id": None,
}
HYBRID = {
    "granitemoehybrid": {
        **GRANITE4,
        "intermediate_size": 24,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "position_embedding_type": "rope",
        "attention_bias": True,
        "rope_parameters": FAST,
    },
    "granitemoehybrid-dense": {
        **GRANITE4,
        "num_local_experts": 0,
        "mamba_n_groups": 1,
        "mamba_proj_bias": True,
    },
    "bamba": {
        **MAMBA,
        "attn_layer_indices": [1],
        "mamba_conv_bias": False,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {**FAST},  # to which transformers adds the share
    },
    "nemotron_h": {
        **NEMOTRON_H,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "use_bias": True,
        "mlp_bias": True,
    },
    "nemotron_h-experts": {
        **NEMOTRON_H,
        "layers_block_type": ["moe", "linear_attention", "full_attention", "moe"],
    },
    "nemotron_h-latent": {
        **NEMOTRON_H,
        "layers_block_type": ["linear_attention", "moe"],
        "moe_latent_size": 12,
        "mlp_bias": True,
    },
    "qwen3_5_text": {**GATED_DELTA, "attention_bias": True},
    "qwen3_next": {**GATED_DELTA, **GATED_EXPERTS, "mlp_only_layers": [1]},
    "qwen3_5_moe_text": {**GATED_DELTA, **GATED_EXPERTS},
    "olmo_hybrid": {**GATED_DELTA, "rope_parameters": FAST, "eos_token_id": None},
    "olmo_hybrid-unrotated": {
        **GATED_DELTA,
        "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
        "attention_bias": True,
        "linear_allow_neg_eigval": False,
    },
    "kimi_linear": {
        **MLA,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": None,
        "layer_types": GATED_DELTA["layer_types"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "rms_norm_eps": 1e-3,
        "linear_head_dim": 12,
        "linear_num_heads": 4,
        "n_shared_experts": 2,
        "attention_bias": True,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    },
    "lfm2": {**CONVOLUTIONS, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.2},
    "lfm2_moe": {
        **CONVOLUTIONS,
        "num_dense_layers": 1,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "routed_scaling_factor": 1.7,
    },
    "lfm2-biased": {**CONVOLUTIONS, "conv_bias": True, "block_auto_adjust_ff_dim": False},
}
"""Families with layers that have a state, tested in test_hybrid.py."""
NEEDED = {
    "granitemoehybrid": MAMBA,
    "bamba": MAMBA,
    "nemotron_h": {"layers_block_type": HYBRID["nemotron_h"]["layers_block_type"]},
    "lfm2": {"layer_types": CONVOLUTIONS["layer_types"]},
    "kimi_linear": {"num_key_value_heads": 6},
    "lfm2_moe": {"layer_types": CONVOLUTIONS["layer_types"]},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "llama4_text": {"intermediate_size_mlp": 80},
    "opt": {"ffn_dim": 80, "dropout": 0.0},
    "deepseek_v2": {"num_key_value_heads": 6, "num_experts_per_tok": 2},
    "deepseek_v3": {"num_key_value_heads": 6},
    "glm4v_moe_text": {"head_dim": 128},
    "glm4_moe_lite": {"num_key_value_heads": 6},
    "deepseek_v32": {"num_key_value_heads": 6},
    "glm_moe_dsa": {"num_key_value_heads": 6},
    "minicpm3": {"num_key_value_heads": 6},
    "youtu": {"num_key_value_heads": 6},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
}
"""What a family's config.json must say besides SIZES."""
LENGTHS = [7, 1, 20, 13]
ALIKE = {
    "cohere",
    "cohere2_moe",
    "cwm",
    "flex_olmo",
    "gemma4_text",
    "granite_swa",
    "helium",
    "hy_v3",
    "internlm3",
    "iquestcoder",
    "mellum",
    "olmo",
    "solar_open",
}
"""Families that differ from others here in what other tests show: loss and gradients are tested by
default, the rest with `pytest -m exhaustive`."""


def marked(families: Iterable[str]) -> list[Any]:
    """Families as parameters of a test that is exhaustive for those of `ALIKE`."""
    return [
        pytest.param(name, marks=pytest.mark.exhaustive if name in ALIKE else ())
        for name in families
    ]


@dataclass
class Twins:
    """The same weights twice."""

    theirs: transformers.PreTrainedModel
    ours: Decoder
    family: Family
    weights: WeightMap


CAPPED = ("gpt_oss", "granite_swa", "gemma2", "vaultgemma")


def hf_model(family: str, *, tied: bool, **more) -> transformers.PreTrainedModel:
    model_type = family.partition("-")[0]
    config = transformers.AutoConfig.for_model(
        model_type,
        **{**SIZES, **(FAMILIES | SPARSE | VARIANTS | HYBRID)[family], **more},
        tie_word_embeddings=tied,
    )
    # Of sinks and soft caps transformers' sdpa knows nothing.
    attention = "eager" if model_type in CAPPED else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
            if name.endswith("layer_scalar"):
                parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            # Not the usual start: biases and norms must differ from 0 and 1 to be told apart.
            centre = 1.0 if parameter.ndim == 1 and "gemma" not in model_type else 0.0
            if name.endswith("conv1d.weight"):
                # Of queries near 0 rounding leaves few digits of the direction.
                centre = 2.0
            if name.endswith("A_log"):
                # Of decays that forget a token at once fp32 sums have few digits.
                centre = -3.0
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(centre + 0.15 * noise)
    return model.eval()


def as_stored(model: transformers.PreTrainedModel, tensors) -> dict[str, torch.Tensor]:
    """Transformers' tensors, or gradients, under the names and in the shapes of a checkpoint."""
    if model.config.model_type == "ernie4_5_vl_moe":
        # Not as files have it, which `engine/hf/stored_forms.py` reads.
        return of_ernie_vl(dict(tensors))
    return published(model, dict(tensors))


def ours_with(theirs: transformers.PreTrainedModel, *, merge_qkv: bool, **how) -> Twins:
    hf_config = theirs.config.to_dict()
    family = get_family(hf_config)
    config = family.read(hf_config)
    weights = family.weight_map(config, merge_qkv=merge_qkv)
    ours = Decoder(config, merge_qkv=merge_qkv, **how)
    state = as_stored(theirs, theirs.state_dict())
    ours.load_state_dict(
        {name: from_hf(weights, name, state.__getitem__) for name in weights.native_names()}
    )
    return Twins(theirs, ours, family, weights)


def twins(family: str, *, tied: bool = False, merge_qkv: bool = False, **how) -> Twins:
    return ours_with(hf_model(family, tied=tied), merge_qkv=merge_qkv, **how)


def documents(lengths=LENGTHS):
    """Token ids of each document, and labels as a prepared row has them: already shifted."""
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(0, 131, (length,), generator=generator) for length in lengths]
    labels = []
    for document in ids:
        shifted = torch.cat((document[1:], torch.tensor([-100])))
        labels.append(
            torch.where(torch.rand(len(document), generator=generator) < 0.2, -100, shifted)
        )
    return ids, labels


def positions(lengths) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients there are, by name."""
    named = ((name, parameter.grad) for name, parameter in model.named_parameters())
    return {name: gradient for name, gradient in named if gradient is not None}


def assert_gradients_equal(got, expected, limit=1e-5):
    """Relative to each gradient's own norm; fp32 sums in another order differ by some 1e-7."""
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        error, norm = (got[name] - gradient).norm(), gradient.norm()
        if name.startswith("model.decoder.") and name.endswith("k_proj.bias"):
            # Where nothing turns it adds the same to all scores of a token, which changes nothing.
            assert max(error, norm) < 1e-5 * expected[name.replace("k_proj", "v_proj")].norm()
            continue
        # Scores that the biases of keys raise alike have fewer digits.
        most = 3e-5 if name.startswith("model.decoder.") else limit
        # Both are 0 for an expert that no token chose.
        assert error <= most * norm, f"{name}: {error:.1e} of {norm:.1e}"


def packed_logits(model: nn.Module, ids) -> torch.Tensor:
    lengths = [len(document) for document in ids]
    return model(torch.cat(ids), positions(lengths), VarlenMetadata.of(lengths))


def packed_loss(model: nn.Module, ids, labels, chunk=11, soft_cap=None) -> torch.Tensor:
    lengths = [len(document) for document in ids]
    loss = Loss(LossOptions(soft_cap=soft_cap), chunk=chunk)
    return model(
        torch.cat(ids),
        positions(lengths),
        VarlenMetadata.of(lengths),
        lambda hidden, head: sum_cross_entropy(hidden, head, torch.cat(labels), loss),
    )


def their_logits(model, document) -> torch.Tensor:
    """One document alone. A mask or a cache would let transformers see across documents."""
    return model(input_ids=document[None], attention_mask=None, use_cache=False).logits[0]


def their_loss(model, ids, labels) -> torch.Tensor:
    """The same sum, one un-packed row at a time."""
    return torch.stack(
        [
            nn.functional.cross_entropy(
                their_logits(model, document).float(), targets, reduction="sum"
            )
            for document, targets in zip(ids, labels, strict=True)
        ]
    ).sum()
