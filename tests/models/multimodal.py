"""Tiny multimodal models of transformers, of every type whose language model is trained."""

import torch
import transformers

TEXT = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
LLAVA = {
    "text_config": {**TEXT, "model_type": "llama"},
    "vision_config": {**VISION, "model_type": "clip_vision_model", "projection_dim": 8},
    "image_token_index": 5,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GLM_VISION = {**QWEN_VISION, "intermediate_size": 24, "image_size": 16}
GLM_ROPE = {**MROPE, "partial_rotary_factor": 0.5}
QWEN3_5 = {
    "text_config": {
        **TEXT,
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "rope_parameters": {
            **MROPE,
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
            "partial_rotary_factor": 0.5,
        },
    },
    "vision_config": {**QWEN_VISION, "num_position_embeddings": 16},
    "tie_word_embeddings": False,
}
QWEN3_VL = {
    "text_config": {
        **TEXT,
        "head_dim": 8,
        "rope_parameters": {**MROPE, "mrope_interleaved": True},
    },
    "vision_config": {
        **QWEN_VISION,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
    "tie_word_embeddings": True,
}


def with_experts(config, **experts):
    """The config with experts in its language model."""
    text = {name: one for name, one in config["text_config"].items() if name != "intermediate_size"}
    return {**config, "text_config": {**text, **EXPERTS, **experts}}


IDEFICS3 = {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": VISION}
CONFIGS = {
    "ernie4_5_vl_moe": {
        "text_config": {
            **TEXT,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": [24, 16],
            "rope_parameters": {**MROPE, "mrope_section": [1, 1, 2]},
        },
        "vision_config": {
            **{"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2},
            "patch_size": 4,
        },
        "tie_word_embeddings": True,
        "image_start_token_id": 6,
        "image_end_token_id": 7,
    },
    "glm4v": {
        "text_config": {**TEXT, "num_attention_heads": 2, "rope_parameters": GLM_ROPE},
        "vision_config": GLM_VISION,
    },
    "glm4v_moe": {
        "text_config": {
            **TEXT,
            "head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_group": 2,
            "routed_scaling_factor": 1.7,
            "rope_parameters": GLM_ROPE,
        },
        "vision_config": GLM_VISION,
    },
    "gemma3": {
        "text_config": {
            **TEXT,
            "head_dim": 8,
            "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": {**VISION, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
    },
    "gemma4": {
        "text_config": {
            **TEXT,
            "model_type": "gemma4_text",
            "head_dim": 8,
            "global_head_dim": 16,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 320,
            "pad_token_id": 0,
        },
        "vision_config": {**VISION, "model_type": "gemma4_vision", "num_key_value_heads": 2},
    },
    "idefics3": IDEFICS3,
    "internvl": {
        "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_config": {
            **VISION,
            "model_type": "internvl_vision",
            "image_size": [32, 32],
            "patch_size": [8, 8],
        },
        "tie_word_embeddings": False,
    },
    "llama4": {
        "text_config": {
            **TEXT,
            "model_type": "llama4_text",
            "head_dim": 8,
            "intermediate_size_mlp": 40,
            "num_local_experts": 4,
            "no_rope_layers": [1, 0],
            "attention_chunk_size": 4,
        },
        "vision_config": {
            **VISION,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
    },
    "llava": LLAVA,
    "llava_next": {**LLAVA, "image_grid_pinpoints": [[32, 32]]},
    "llava_onevision": {
        "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_config": {**VISION, "model_type": "siglip_vision_model"},
        "image_grid_pinpoints": [[32, 32]],
    },
    "mistral3": {
        "text_config": {**TEXT, "model_type": "mistral", "head_dim": 8, "sliding_window": None},
        "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 8},
        "tie_word_embeddings": False,
    },
    "qwen2_vl": {
        "text_config": {**TEXT, "rope_parameters": MROPE},
        "vision_config": {
            "depth": 1,
            "embed_dim": 16,
            "hidden_size": 32,
            "num_heads": 2,
            "patch_size": 4,
        },
        "tie_word_embeddings": True,
    },
    "qwen2_5_vl": {
        "text_config": {**TEXT, "rope_parameters": MROPE},
        "vision_config": {**QWEN_VISION, "fullatt_block_indexes": [0]},
        "tie_word_embeddings": False,
    },
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": with_experts(QWEN3_5, shared_expert_intermediate_size=40),
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": with_experts(QWEN3_VL, intermediate_size=40, mlp_only_layers=[0]),
    "smolvlm": {**IDEFICS3, "tie_word_embeddings": True},
}


def multimodal_model(model_type):
    """A model with random weights, of which no tensor is ones or zeros."""
    config = transformers.AutoConfig.for_model(model_type, **CONFIGS[model_type])
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()
