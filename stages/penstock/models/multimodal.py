"""Multimodal models whose language model is trained as text: its config, and the names of its
tensors.

Published files call the backbone of the language model `model.language_model`,
`model.text_model`, `language_model.model` or `model`. Here it is always `model`, as in a text
model, and in transformers' class it is one of the first three. No torch.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

TEXT_CONFIG = "text_config"
TIED = "tie_word_embeddings"

BACKBONE = "model."
MODULE_BACKBONE = "model.language_model."
TEXT_BACKBONE = "model.text_model."
STORED_BACKBONE = re.compile(r"(?:model\.(?:language|text)_model|language_model\.model)\.")
STORED_MODEL = "language_model.model."
STORED_HEAD = "language_model.lm_head"
# Beginnings of the names of a language model's tensors.
LANGUAGE = ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.")


@dataclass(frozen=True)
class Multimodal:
    """A multimodal model type."""

    architecture: str
    """The transformers class."""
    text_type: str
    """The model type of `text_config` where it names none."""
    tied: bool = False
    """`tie_word_embeddings` where config.json has none."""
    backbone: str = MODULE_BACKBONE
    """The backbone of the language model in the class, with a dot at the end."""
    adapts_experts: bool = True
    """Whether PEFT takes adapters of each expert, as it does of the language model alone."""


MULTIMODAL: Mapping[str, Multimodal] = {
    "ernie4_5_vl_moe": Multimodal(
        "Ernie4_5_VLMoeForConditionalGeneration", "ernie4_5_vl_moe_text", tied=True
    ),
    "gemma3": Multimodal("Gemma3ForConditionalGeneration", "gemma3_text", tied=True),
    "gemma4": Multimodal("Gemma4ForConditionalGeneration", "gemma4_text", tied=True),
    "glm4v": Multimodal("Glm4vForConditionalGeneration", "glm4v_text"),
    "glm4v_moe": Multimodal("Glm4vMoeForConditionalGeneration", "glm4v_moe_text"),
    "idefics3": Multimodal("Idefics3ForConditionalGeneration", "llama", backbone=TEXT_BACKBONE),
    "internvl": Multimodal("InternVLForConditionalGeneration", "qwen2", tied=True),
    "llama4": Multimodal("Llama4ForConditionalGeneration", "llama4_text", backbone=STORED_MODEL),
    "llava": Multimodal("LlavaForConditionalGeneration", "llama"),
    "llava_next": Multimodal("LlavaNextForConditionalGeneration", "llama"),
    "llava_onevision": Multimodal("LlavaOnevisionForConditionalGeneration", "qwen2"),
    "mistral3": Multimodal("Mistral3ForConditionalGeneration", "mistral", tied=True),
    "qwen2_vl": Multimodal("Qwen2VLForConditionalGeneration", "qwen2_vl_text"),
    "qwen2_5_vl": Multimodal("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text"),
    "qwen3_5": Multimodal("Qwen3_5ForConditionalGeneration", "qwen3_5_text"),
    "qwen3_5_moe": Multimodal(
        "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text", adapts_experts=False
    ),
    "qwen3_vl": Multimodal("Qwen3VLForConditionalGeneration", "qwen3_vl_text"),
    "qwen3_vl_moe": Multimodal("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text"),
    "smolvlm": Multimodal("SmolVLMForConditionalGeneration", "llama", backbone=TEXT_BACKBONE),
}
"""By the `model_type` of config.json."""


def _sizes(
    vocab_size: int, hidden_size: int, intermediate_size: int, layers: int, heads: int, length: int
) -> dict[str, int]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": length,
    }


_QWEN = {**_sizes(151936, 4096, 22016, 32, 32, 32768), "num_key_value_heads": 32}
_QWEN_VL = {
    **_sizes(152064, 8192, 29568, 80, 64, 32768),
    "num_key_value_heads": 8,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-5,
}

# Rotary positions in three axes are those of the text model where there are no images.
# Model types of `text_config`, and the text models that compute the same on text.
SAME_ON_TEXT: Mapping[str, str] = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}

# Values of fields that `text_config` lacks, by its model type: files may leave out what is
# transformers' default.
TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "ernie4_5_vl_moe_text": _sizes(103424, 2560, 12288, 28, 20, 131072),
    "gemma3_text": _sizes(262208, 2304, 9216, 26, 8, 131072),
    "gemma4_text": _sizes(262144, 2304, 9216, 30, 8, 131072),
    "glm4v_text": _sizes(151552, 4096, 13696, 40, 32, 32768),
    "glm4v_moe_text": _sizes(151424, 4096, 10944, 46, 96, 65536),
    "llama": _sizes(32000, 4096, 11008, 32, 32, 2048),
    "llama4_text": {**_sizes(202048, 5120, 8192, 48, 40, 131072), "intermediate_size_mlp": 16384},
    "mistral": _sizes(32000, 4096, 14336, 32, 32, 131072),
    "qwen2": _QWEN,
    "qwen3": _QWEN,
    "qwen2_vl_text": _QWEN_VL,
    "qwen2_5_vl_text": _QWEN_VL,
    "qwen3_5_text": _sizes(248320, 4096, 12288, 32, 16, 32768),
    "qwen3_5_moe_text": _sizes(248320, 2048, 512, 40, 16, 32768),
    "qwen3_vl_text": {**_QWEN, "max_position_embeddings": 128000, "rope_theta": 5e5},
    "qwen3_vl_moe_text": {**_sizes(151936, 2048, 5632, 24, 16, 128000), "rope_theta": 5e5},
}


def language_config(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config.json of the language model in a multimodal one; others as they are.

    Older files of Qwen2-VL have no `text_config`, and its fields at the top level.
    """
    multimodal = MULTIMODAL.get(str(hf.get("model_type")))
    if multimodal is None:
        return hf
    nested = hf.get(TEXT_CONFIG)
    is_nested = isinstance(nested, Mapping)
    text: Mapping[str, Any] = nested if is_nested else hf
    text_type = text.get("model_type", multimodal.text_type) if is_nested else multimodal.text_type
    of_text = text.get(TIED)
    tied = hf.get(TIED, multimodal.tied if of_text is None else of_text)
    text_model = SAME_ON_TEXT.get(text_type, text_type)
    defaults = TEXT_DEFAULTS.get(text_type, {})
    text_config = {**defaults, **text, "model_type": text_model, TIED: tied}
    if quantization := hf.get("quantization_config"):
        text_config["quantization_config"] = quantization
    # Without images the positions of all axes are the same, which is RoPE with one axis.
    for table in ("rope_parameters", "rope_scaling"):
        if rope := text_config.get(table):
            # The older name of default RoPE with three axes.
            text_config[table] = {
                name: "default" if name.endswith("type") and value == "mrope" else value
                for name, value in rope.items()
            }
    return text_config


def text_name(stored: str) -> str:
    """The name in a text model of a language model's tensor; those of other parts are unchanged."""
    if match := STORED_BACKBONE.match(stored):
        return BACKBONE + stored[match.end() :]
    return stored.removeprefix("language_model.") if stored.startswith(STORED_HEAD) else stored


def is_language(stored: str) -> bool:
    """Whether a stored tensor belongs to the language model."""
    return text_name(stored).startswith(LANGUAGE)


def stored_name(name: str, backbone: str = MODULE_BACKBONE) -> str:
    """The name of a text model's tensor or module in files, or in a multimodal class, that call the
    backbone so."""
    if name.startswith(BACKBONE):
        return backbone + name.removeprefix(BACKBONE)
    return f"language_model.{name}" if backbone.startswith("language_model.") else name


def stored_backbone(stored: Iterable[str]) -> str:
    """What files with these tensors call the backbone, with a dot at the end; as transformers does
    if they have none."""
    for name in stored:
        before, is_embedding, _ = name.partition("embed_tokens.")
        if is_embedding and text_name(name).startswith(LANGUAGE):
            return before
    return MODULE_BACKBONE
