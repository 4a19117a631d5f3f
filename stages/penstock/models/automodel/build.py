"""Builds transformers models on the meta device, and computes their non-persistent buffers."""

from collections.abc import Mapping
from copy import deepcopy
from difflib import get_close_matches
from typing import Any

import torch

from penstock.core.errors import CapabilityError
from penstock.models.automodel.attention import NAME, register
from penstock.models.automodel.media.absent_tower import has_absent_tower, without_tower
from penstock.models.automodel.media.cross_attention import is_cross_attended, keep_apart
from penstock.models.automodel.outline import AttentionImpl
from penstock.models.automodel.remote_code import AUTO_MAP, CODE, CONFIG, MODEL, load_class

# Of configs whose code is the model's own.
_MODEL_CLASSES: dict[type, Any] = {}


def build_config(hf_config: Mapping[str, Any]) -> Any:
    """The transformers config of a config.json. Of a multimodal model without a class for images or
    audio and text, it is that of its language model.

    Raises CapabilityError for a model type that the installed transformers does not know, or values
    that its config class refuses.
    """
    from transformers import (  # noqa: PLC0415 - planning native models avoids it
        CONFIG_MAPPING,
        PreTrainedConfig,
    )

    # As from a file: JSON has no infinity.
    values = PreTrainedConfig._decode_special_floats(dict(hf_config))
    # Weights are dequantized, or quantized by our layers.
    values.pop("quantization_config", None)
    if CODE in hf_config:
        return _config_of_code(hf_config, values)
    values |= absent_rope(values)
    kind = values.pop("model_type", None)
    if kind not in CONFIG_MAPPING:
        near = get_close_matches(str(kind), CONFIG_MAPPING, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        if AUTO_MAP in hf_config:
            raise CapabilityError(
                f"the model's config.json says model_type {kind!r}, whose code is not part of the "
                "installed transformers but of the model (auto_map), and it is not run unasked.\n"
                "  Read the code, then write model.trust_remote_code: true, and for a hub id "
                "model.code_revision: the commit that you have read."
            )
        raise CapabilityError(
            f"the model's config.json says model_type {kind!r}, which neither is native nor known "
            f"to the installed transformers.{hint}\n"
            "  Install a newer transformers, or use another model."
        )
    try:
        config = CONFIG_MAPPING[kind].from_dict(values)
        return config if is_multimodal(config) else language_config(config)
    except (ValueError, TypeError, KeyError) as error:
        raise CapabilityError(
            f"transformers refuses the model's config.json: {error}\n"
            "  Correct it, or overwrite the value with model.foundation."
        ) from error


def absent_rope(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The `rope_parameters` that a config.json of DBRX lacks: its rope_theta, 500000, is in
    attn_config, where transformers 5 does not read it, and would compute with 10000."""
    theta = (hf_config.get("attn_config") or {}).get("rope_theta")
    if hf_config.get("model_type") != "dbrx" or "rope_parameters" in hf_config or not theta:
        return {}
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def _config_of_code(hf_config: Mapping[str, Any], values: dict[str, Any]) -> Any:
    config_class, model_class = (load_class(hf_config, name) for name in (CONFIG, MODEL))
    _MODEL_CLASSES[config_class] = model_class
    values = {key: value for key, value in values.items() if key not in (CODE, AUTO_MAP)}
    try:
        return config_class.from_dict(values)
    except Exception as error:  # What the code may raise is not known.
        raise CapabilityError(
            f"{config_class.__name__} refuses the model's config.json: {error}\n"
            "  Correct it, or overwrite the value with model.foundation."
        ) from error


def is_multimodal(config: Any) -> bool:
    """Whether the model of a config is built with its parts for images and audio, by
    AutoModelForMultimodalLM. A text model that is of the same type as its language model is not,
    nor is an audio model that transformers lists as a causal language model."""
    from transformers import (  # noqa: PLC0415
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_MULTIMODAL_LM_MAPPING,
    )

    if type(config) not in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return False
    is_text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if is_text and not takes_images(config):
        return False
    return not is_text or config.get_text_config(decoder=True) is not config


def takes_images(config: Any) -> bool:
    """Whether the model of a config is one of AutoModelForImageTextToText."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING  # noqa: PLC0415

    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def language_config(config: Any) -> Any:
    """The config of the language model in a multimodal config; another config itself."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING  # noqa: PLC0415

    text = config.get_text_config(decoder=True)
    # Of a flat encoder-decoder config it would be a copy without the decoder's own names.
    is_part = type(text) is not type(config) and type(text) in MODEL_FOR_CAUSAL_LM_MAPPING
    return text if is_part else config


def model_class(config: Any) -> Any:
    """The class of `build_model`. Raises CapabilityError if transformers has none."""
    from transformers import (  # noqa: PLC0415
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_MULTIMODAL_LM_MAPPING,
    )

    if own_class := _MODEL_CLASSES.get(type(config)):
        return own_class
    of_type: Any = (
        MODEL_FOR_MULTIMODAL_LM_MAPPING if is_multimodal(config) else MODEL_FOR_CAUSAL_LM_MAPPING
    )
    if type(config) not in of_type:
        raise CapabilityError(f"transformers has no language model of type {config.model_type}")
    # Where a type has several classes, the first is the default of transformers.
    cls = of_type[type(config)]
    return cls[0] if isinstance(cls, tuple) else cls


def build_meta(config: Any, attention: AttentionImpl) -> Any:
    """The model of a config, on the meta device in fp32, in training mode."""
    with torch.device("meta"):
        return build_model(config, attention)


def build_model(config: Any, attention: AttentionImpl) -> Any:
    """The causal language model, or multimodal model, of a config in fp32, in training mode.

    Raises CapabilityError if transformers has no such model of this type, or it cannot be built.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM  # noqa: PLC0415

    register()
    implementation = NAME if attention == "varlen" else attention
    own_class = _MODEL_CLASSES.get(type(config))
    is_whole = own_class is None and is_multimodal(config)
    auto: Any = AutoModelForMultimodalLM if is_whole else AutoModelForCausalLM
    make = own_class._from_config if own_class else auto.from_config
    kind = "a multimodal" if is_whole else "a causal language"
    # from_config writes the attention implementation and the dtype into it.
    config = deepcopy(config)
    if is_whole and has_absent_tower(config):
        config = without_tower(config)
    try:
        model = make(config, attn_implementation=implementation, dtype=torch.float32)
    except Exception as error:  # What a model's constructor may raise is not known.
        raise CapabilityError(
            f"transformers cannot build {kind} model of type {config.model_type}: "
            f"{(str(error).strip() or type(error).__name__).splitlines()[0]}"
        ) from error
    if is_whole and is_cross_attended(config):
        keep_apart(model)
    return model.train()


def computed_buffers(model: Any) -> dict[str, torch.Tensor]:
    """The values of a meta model's buffers, on the CPU: what its initialization computes, such as
    rotary frequencies. The model's parameters stay on the meta device."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    # It also computes rotary frequencies, which are buffers and not in checkpoints.
    model.initialize_weights()
    return {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta}
