"""Llama, and families that are Llama but for defaults, biases, QK norm, and layers with windows or
without RoPE: Qwen, Mistral, InternLM 3, IQuest-Coder, CWM, Helium, Seed-OSS and SmolLM3."""

from collections.abc import Sequence

from penstock.core.errors import ConfigError
from penstock.models.decoder_config import DecoderConfig, QueryScale
from penstock.models.family import Family
from penstock.models.hf_config import (
    HfConfig,
    attention_bias,
    config_get,
    config_require,
    decoder_config,
    full_rope,
    mlp_bias,
    require_full_rotary,
    rope_parameters,
    sliding,
    sliding_after_max_window_layers,
    sliding_everywhere,
)

CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# RoPE parameters where config.json has none.
MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read_llama(hf: HfConfig) -> DecoderConfig:
    """Llama 2 and 3: optional biases everywhere, no QK norm."""
    return decoder_config(hf, **attention_bias(hf), **mlp_bias(hf))


def read_internlm3(hf: HfConfig) -> DecoderConfig:
    """InternLM 3, whose published files call the biases `qkv_bias` and `bias`."""
    return decoder_config(
        hf,
        defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5},
        **attention_bias(hf, default=config_get(hf, "qkv_bias", False)),
        **mlp_bias(hf, default=config_get(hf, "bias", False)),
    )


def read_iquestcoder(hf: HfConfig) -> DecoderConfig:
    """IQuest-Coder."""
    return decoder_config(
        hf,
        defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
        **attention_bias(hf),
        **mlp_bias(hf),
    )


def read_cwm(hf: HfConfig) -> DecoderConfig:
    """CWM: full attention in every fourth layer."""
    layers = range(config_require(hf, "num_hidden_layers"))
    has_rope = any(hf.get(name) for name in ("rope_parameters", "rope_scaling", "rope_theta"))
    rope = hf if has_rope else {**hf, "rope_parameters": CWM_ROPE}
    return decoder_config(
        hf,
        defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
        rope_parameters=full_rope(rope, theta=1e6),
        **mlp_bias(hf),
        **sliding(hf, hf.get("sliding_window", 8192), (layer for layer in layers if layer % 4)),
    )


def read_helium(hf: HfConfig) -> DecoderConfig:
    """Helium: interleaved RoPE."""
    return decoder_config(
        hf,
        defaults={"num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8},
        rope_parameters=full_rope(hf, theta=100_000.0),
        rope_pairs="neighbours",
        # o_proj has none, whatever attention_bias is (transformers' HeliumAttention).
        qkv_bias=bool(config_get(hf, "attention_bias", False)),
        **mlp_bias(hf),
    )


def read_qwen2(hf: HfConfig) -> DecoderConfig:
    """Qwen2 and Qwen2.5: biases on q, k and v only, for which config.json has no field."""
    return decoder_config(hf, qkv_bias=True, **sliding_after_max_window_layers(hf))


def read_qwen3(hf: HfConfig) -> DecoderConfig:
    """Qwen3, dense: QK norm (RMSNorm per head); head_dim is its own field."""
    return decoder_config(
        hf,
        defaults={"head_dim": 128},
        qk_norm=True,
        **attention_bias(hf),
        **sliding_after_max_window_layers(hf),
    )


def read_seed_oss(hf: HfConfig) -> DecoderConfig:
    """Seed-OSS: biases on q, k and v, and head_dim as its own field."""
    faults = []
    if config_get(hf, "attention_dropout", None) is None:
        faults.append("attention_dropout is 0.1, because config.json has none; write 0")
    if rate := config_get(hf, "residual_dropout", 0.1):
        faults.append(
            f"residual_dropout is {rate}; write 0 here (model.foundation overrides it), and"
            f" train.dropout.hidden: {rate} if hidden states are to be dropped"
        )
    return decoder_config(
        hf,
        unsupported=faults,
        defaults={"num_key_value_heads": 8},
        head_dim=_head_dim(hf),
        qkv_bias=bool(config_get(hf, "attention_bias", True)),
        o_bias=bool(config_get(hf, "attention_out_bias", False)),
        **mlp_bias(hf),
    )


def _head_dim(hf: HfConfig) -> int:
    # transformers derives it where it is null, and takes 128 where it is absent.
    width = config_require(hf, "hidden_size") // config_require(hf, "num_attention_heads")
    return config_get(hf, "head_dim", width if "head_dim" in hf else 128)


def read_smollm3(hf: HfConfig) -> DecoderConfig:
    """SmolLM3: no RoPE in some layers, every fourth by default, which may have windows."""
    layers = range(config_require(hf, "num_hidden_layers"))
    # 1 marks a layer with RoPE, 0 one without.
    marks = config_get(hf, "no_rope_layers", None)
    if marks is None:
        step = config_get(hf, "no_rope_layer_interval", 4)
        without_rope = tuple(layer for layer in layers if (layer + 1) % step == 0)
    elif not isinstance(marks, Sequence) or len(marks) < len(layers):
        raise ConfigError(
            f"the model's no_rope_layers (config.json) is {marks!r}; it must have a number for "
            f"each of the {len(layers)} layers."
        )
    else:
        without_rope = tuple(layer for layer in layers if not marks[layer])
    windowed = without_rope if config_get(hf, "use_sliding_window", False) else ()
    return decoder_config(
        hf,
        defaults={"num_key_value_heads": 4, "tie_word_embeddings": True},
        rope_parameters=full_rope(hf, theta=2e6),
        no_rope_layers=without_rope,
        **attention_bias(hf),
        **mlp_bias(hf),
        **sliding(hf, hf.get("sliding_window"), windowed),
    )


def read_mistral(hf: HfConfig) -> DecoderConfig:
    """Mistral: sliding-window attention in every layer, or in none."""
    windows = sliding_everywhere(hf, hf.get("sliding_window", 4096))
    return decoder_config(hf, defaults={"num_key_value_heads": 8}, **windows)


def read_ministral(hf: HfConfig) -> DecoderConfig:
    """Ministral: Mistral with sliding-window attention in some layers."""
    every_layer = range(config_require(hf, "num_hidden_layers"))
    windows = sliding(hf, hf.get("sliding_window", 4096), every_layer)
    return decoder_config(hf, defaults={"num_key_value_heads": 8}, **windows)


def read_ministral3(hf: HfConfig) -> DecoderConfig:
    """Ministral 3: Mistral with YaRN, and queries that are scaled by their position."""
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or MINISTRAL3_ROPE
    length, beta = (
        rope.get(name) for name in ("original_max_position_embeddings", "llama_4_scaling_beta")
    )
    scale = None
    if beta is not None:
        scale = QueryScale(beta, length or config_require(hf, "max_position_embeddings"))
    return decoder_config(
        hf,
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
        head_dim=_head_dim(hf),
        rope_parameters=require_full_rotary(rope_parameters({**hf, "rope_scaling": rope})),
        query_scale=scale,
        **sliding_everywhere(hf, hf.get("sliding_window")),
    )


LLAMA = Family("llama", "LlamaForCausalLM", read_llama)
INTERNLM3 = Family("internlm3", "LlamaForCausalLM", read_internlm3)
IQUESTCODER = Family("iquestcoder", "LlamaForCausalLM", read_iquestcoder)
CWM = Family("cwm", "CwmForCausalLM", read_cwm)
HELIUM = Family("helium", "HeliumForCausalLM", read_helium)
QWEN2 = Family("qwen2", "Qwen2ForCausalLM", read_qwen2)
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", read_qwen3)
SEED_OSS = Family("seed_oss", "SeedOssForCausalLM", read_seed_oss)
SMOLLM3 = Family("smollm3", "SmolLM3ForCausalLM", read_smollm3)
MISTRAL = Family("mistral", "MistralForCausalLM", read_mistral)
MINISTRAL = Family("ministral", "MinistralForCausalLM", read_ministral)
MINISTRAL3 = Family("ministral3", "Ministral3ForCausalLM", read_ministral3)
