"""Maps `model_type` in Hugging Face's config.json to a model family."""

from dataclasses import replace
from difflib import get_close_matches
from typing import Literal

from penstock.core.errors import CapabilityError, ConfigError
from penstock.core.extensions import FAMILIES
from penstock.models.automodel.family import auto_family
from penstock.models.decoder_config import DecoderConfig
from penstock.models.families.ernie import ERNIE4_5_VL_MOE
from penstock.models.families.glm import GLM4V, GLM4V_MOE
from penstock.models.families.qwen import QWEN3_VL_MOE
from penstock.models.family import Family
from penstock.models.hf_config import HfConfig, NotNativeError, native_type
from penstock.models.multimodal import MULTIMODAL, language_config
from penstock.models.quantization_config import parse_quantization_config

LANGUAGE_MODELS = {
    family.model_type: family for family in (ERNIE4_5_VL_MOE, GLM4V, GLM4V_MOE, QWEN3_VL_MOE)
}
"""Families that are only the language model of a multimodal model, not a model of their own."""


Backend = Literal["auto", "native", "transformers"]
"""Whose model code is trained: our decoder's, or that of transformers; `auto`: ours where the
family computes it."""


def get_family(hf_config: HfConfig, backend: Backend = "auto", *, adapters: bool = False) -> Family:
    """The model family of this config.json. With `adapters` (LoRA), `auto` takes the transformers
    backend for native models whose layers cannot have any.

    Raises:
        CapabilityError: for a model_type that is not native, with the native backend; for a model
            that transformers cannot build, or that cannot be trained, with the other one.
    """
    model_type = str(native_type(hf_config))
    native = native_family(hf_config)
    refusal = _refusal(native, hf_config, adapters) if native and backend == "auto" else None
    if native and backend != "transformers" and refusal is None:
        return native
    if refusal is not None:
        return _fallback(hf_config, refusal)
    if backend != "native":
        _require_readable(hf_config)
        return auto_family(hf_config)
    if model_type in MULTIMODAL:
        text_type = language_config(hf_config)["model_type"]
        raise CapabilityError(
            f"model.backend is native, and the language model of this {model_type} is of the type "
            f"{text_type!r} (text_config in config.json); {', '.join(FAMILIES.names)} are native.\n"
            "  Write model.backend: auto, or use a model with one of these."
        )
    near = get_close_matches(model_type, FAMILIES.names, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise CapabilityError(
        f"model.backend is native, and the model's config.json says model_type {model_type!r}; "
        f"{', '.join(FAMILIES.names)} are native.{hint}\n"
        "  Write model.backend: auto, or use a model of one of these families."
    )


def is_native(hf_config: HfConfig, backend: Backend = "auto", *, adapters: bool = False) -> bool:
    """Whether our decoder computes the model of this config.json, as `get_family` decides it."""
    family = native_family(hf_config)
    if backend == "transformers" or family is None:
        return False
    return backend == "native" or _refusal(family, hf_config, adapters) is None


def native_family(hf_config: HfConfig) -> Family | None:
    """The native family of this model type, whether or not it computes this config.json."""
    return find_family(native_type(hf_config) or "") or _language_model(hf_config)


def find_family(model_type: str) -> Family | None:
    """The family of this type, ours or an installed package's; None without one. Raises ConfigError
    for a type of two packages, or of one that cannot be imported."""
    return FAMILIES.load(model_type) if model_type in FAMILIES.names else None


def _refusal(family: Family, hf_config: HfConfig, adapters: bool) -> NotNativeError | None:
    # Why a native family does not compute this config.json; None for errors that it would raise
    # with either backend.
    try:
        config = family.read(hf_config)
    except NotNativeError as error:
        return error
    except (ConfigError, CapabilityError, TypeError, ValueError, LookupError, ArithmeticError):
        return None
    if not adapters or config.is_adaptable:
        return None
    reason = f"layers of a {family.model_type} cannot have adapters (lora.enable_lora)"
    return NotNativeError(f"{reason}.\n  Write lora.enable_lora: false.", [reason])


def _fallback(hf_config: HfConfig, refusal: NotNativeError) -> Family:
    # The family of the transformers backend. Raises `refusal` if transformers cannot build the
    # model either.
    try:
        _require_readable(hf_config)
        return replace(auto_family(hf_config), not_native=refusal.reasons)
    # Whatever transformers raises, what the native family lacks says more to the user.
    except Exception as error:
        raise refusal from error


def _require_readable(hf_config: HfConfig) -> None:
    declared = parse_quantization_config(hf_config)
    if declared and declared.quant_method == "mxfp4":
        raise CapabilityError(
            "the model is published in mxfp4, and the transformers backend reads weights that are "
            "quantized matrix by matrix.\n"
            "  Name the model that it was quantized from as model.model_path."
        )


def _language_model(hf_config: HfConfig) -> Family | None:
    # The native family of the language model in a multimodal model, under the model's own type;
    # None without one.
    model_type = str(hf_config.get("model_type"))
    multimodal = MULTIMODAL.get(model_type)
    if multimodal is None:
        return None
    text_type = language_config(hf_config)["model_type"]
    family = find_family(text_type) or LANGUAGE_MODELS.get(text_type)
    if family is None:
        return None

    def read(hf: HfConfig) -> DecoderConfig:
        config = family.read(language_config(hf))
        # PEFT takes adapters of each expert of some language models alone, not within the whole.
        if config.experts is None or multimodal.adapts_experts:
            return config
        return replace(config, experts=replace(config.experts, adaptable=False))

    return replace(
        family,
        model_type=model_type,
        architecture=multimodal.architecture,
        read=read,
        multimodal=multimodal.backbone,
    )
