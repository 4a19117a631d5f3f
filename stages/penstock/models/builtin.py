"""Model configs that ship with the code, small enough to train on a CPU."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.core.errors import ConfigError

SCHEME = "builtin:"
T = TypeVar("T")

_SHAPE: Mapping[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "attention_dropout": 0.0,
    "dtype": "float32",
}

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "tiny-llama": {
        **_SHAPE,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
    },
    "tiny-qwen2": {
        **_SHAPE,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": False,
    },
    "tiny-qwen3": {
        **_SHAPE,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "use_sliding_window": False,
    },
    "tiny-qwen3-moe": {
        **_SHAPE,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "use_sliding_window": False,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.001,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "tiny-gpt-oss": {
        **_SHAPE,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "intermediate_size": 96,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
    },
}


@dataclass(frozen=True)
class BuiltinEncoder:
    """A vision tower that ships with the code."""

    config: dict[str, Any]
    """Its config.json."""
    preprocessor: dict[str, Any]
    """Its preprocessor_config.json."""


_TOWER: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
_PREPROCESSOR: Mapping[str, Any] = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"height": 32, "width": 32},
}

ENCODERS: Mapping[str, BuiltinEncoder] = {
    "tiny-clip": BuiltinEncoder(
        {"model_type": "clip_vision_model", **_TOWER},
        {
            "image_processor_type": "CLIPImageProcessor",
            "do_center_crop": False,
            **_PREPROCESSOR,
        },
    ),
    "tiny-siglip": BuiltinEncoder(
        {"model_type": "siglip_vision_model", "vision_use_head": False, **_TOWER},
        {"image_processor_type": "SiglipImageProcessor", **_PREPROCESSOR},
    ),
}


def builtin_encoder(name: str) -> BuiltinEncoder:
    """A copy of the vision tower `builtin:<name>`. Raises ConfigError for an unknown name."""
    return _copy(ENCODERS, name, "a built-in vision model")


def builtin_config(name: str) -> dict[str, Any]:
    """A new Hugging Face config for `builtin:<name>`. Raises ConfigError for an unknown name."""
    return dict(_copy(CONFIGS, name, "a built-in model"))


def _copy(table: Mapping[str, T], name: str, noun: str) -> T:
    short = name.removeprefix(SCHEME)
    if short not in table:
        names = ", ".join(f"{SCHEME}{name}" for name in table)
        raise ConfigError(f"{name} is not {noun}; there is {names}.")
    return deepcopy(table[short])
