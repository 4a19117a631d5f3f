"""Maps `model_type` in Hugging Face's config.json to a model family."""

from dataclasses import replace
from difflib import get_close_matches
from typing import Literal

from penstock.core.errors import CapabilityError, ConfigError
from penstock.models.automodel.family import auto_family
from penstock.models.decoder_config import DecoderConfig
from penstock.models.families.dense.arcee import ARCEE
from penstock.models.families.dense.ernie4_5 import ERNIE4_5
from penstock.models.families.dense.exaone4 import EXAONE4
from penstock.models.families.dense.glm import GLM, GLM4
from penstock.models.families.dense.granite import GRANITE
from penstock.models.families.dense.granite_swa import GRANITE_SWA
from penstock.models.families.dense.hunyuan_v1_dense import HUNYUAN_V1_DENSE
from penstock.models.families.dense.hyperclovax import HYPERCLOVAX
from penstock.models.families.dense.jais2 import JAIS2
from penstock.models.families.dense.like_llama import CWM, HELIUM, INTERNLM3, IQUESTCODER
from penstock.models.families.dense.llama import LLAMA
from penstock.models.families.dense.ministral import MINISTRAL
from penstock.models.families.dense.ministral3 import MINISTRAL3
from penstock.models.families.dense.mistral import MISTRAL
from penstock.models.families.dense.nemotron import NEMOTRON
from penstock.models.families.dense.olmo import OLMO
from penstock.models.families.dense.olmo2 import OLMO2, OLMO3
from penstock.models.families.dense.opt import OPT
from penstock.models.families.dense.phi3 import PHI3
from penstock.models.families.dense.qwen2 import QWEN2
from penstock.models.families.dense.qwen3 import QWEN3
from penstock.models.families.dense.seed_oss import SEED_OSS
from penstock.models.families.dense.smollm3 import SMOLLM3
from penstock.models.families.dense.stablelm import STABLELM
from penstock.models.families.gemma.gemma import GEMMA
from penstock.models.families.gemma.gemma2 import GEMMA2
from penstock.models.families.gemma.gemma3 import GEMMA3
from penstock.models.families.gemma.gemma4 import GEMMA4
from penstock.models.families.gemma.vaultgemma import VAULTGEMMA
from penstock.models.families.hybrid.bamba import BAMBA
from penstock.models.families.hybrid.granitemoehybrid import GRANITEMOEHYBRID
from penstock.models.families.hybrid.kimi_linear import KIMI_LINEAR
from penstock.models.families.hybrid.lfm2 import LFM2, LFM2_MOE
from penstock.models.families.hybrid.nemotron_h import NEMOTRON_H
from penstock.models.families.hybrid.olmo_hybrid import OLMO_HYBRID
from penstock.models.families.hybrid.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from penstock.models.families.hybrid.qwen3_next import QWEN3_NEXT
from penstock.models.families.latent.deepseek_v2 import DEEPSEEK_V2
from penstock.models.families.latent.deepseek_v3 import DEEPSEEK_V3
from penstock.models.families.latent.glm4_moe_lite import GLM4_MOE_LITE
from penstock.models.families.latent.minicpm3 import MINICPM3
from penstock.models.families.latent.sparse import DEEPSEEK_V32, GLM_MOE_DSA
from penstock.models.families.latent.youtu import YOUTU
from penstock.models.families.moe.dots1 import DOTS1
from penstock.models.families.moe.ernie4_5_moe import ERNIE4_5_MOE
from penstock.models.families.moe.exaone_moe import EXAONE_MOE
from penstock.models.families.moe.flex_olmo import FLEX_OLMO
from penstock.models.families.moe.glm4_moe import GLM4_MOE
from penstock.models.families.moe.gpt_oss import GPT_OSS
from penstock.models.families.moe.granitemoe import GRANITEMOE
from penstock.models.families.moe.hunyuan_v1_moe import HUNYUAN_V1_MOE
from penstock.models.families.moe.hy_v3 import HY_V3
from penstock.models.families.moe.llama4 import LLAMA4
from penstock.models.families.moe.mellum import MELLUM
from penstock.models.families.moe.minimax_m2 import MINIMAX_M2
from penstock.models.families.moe.mixtral import MIXTRAL
from penstock.models.families.moe.olmoe import OLMOE
from penstock.models.families.moe.qwen2_moe import QWEN2_MOE
from penstock.models.families.moe.qwen3_moe import QWEN3_MOE
from penstock.models.families.moe.solar_open import SOLAR_OPEN
from penstock.models.families.parallel.cohere import COHERE, COHERE2
from penstock.models.families.parallel.cohere2_moe import COHERE2_MOE
from penstock.models.families.vision.ernie4_5_vl_moe import ERNIE4_5_VL_MOE
from penstock.models.families.vision.glm4v import GLM4V, GLM4V_MOE
from penstock.models.families.vision.qwen3_vl_moe import QWEN3_VL_MOE
from penstock.models.family import Family
from penstock.models.hf_config import HfConfig, NotNativeError, native_type
from penstock.models.multimodal import MULTIMODAL, language_config
from penstock.models.quantization_config import parse_quantization_config

FAMILIES = {
    family.model_type: family
    for family in (
        LLAMA,
        QWEN2,
        QWEN3,
        QWEN3_MOE,
        QWEN2_MOE,
        MIXTRAL,
        ERNIE4_5,
        ERNIE4_5_MOE,
        GLM4_MOE,
        DOTS1,
        GPT_OSS,
        GRANITEMOE,
        HUNYUAN_V1_MOE,
        MINIMAX_M2,
        OLMOE,
        ARCEE,
        JAIS2,
        NEMOTRON,
        STABLELM,
        OPT,
        MISTRAL,
        MINISTRAL,
        MINISTRAL3,
        PHI3,
        SMOLLM3,
        OLMO2,
        OLMO3,
        GRANITE,
        GLM,
        GLM4,
        SEED_OSS,
        GEMMA,
        GEMMA2,
        GEMMA3,
        GEMMA4,
        HUNYUAN_V1_DENSE,
        EXAONE4,
        HYPERCLOVAX,
        VAULTGEMMA,
        DEEPSEEK_V3,
        DEEPSEEK_V2,
        GLM4_MOE_LITE,
        DEEPSEEK_V32,
        GLM_MOE_DSA,
        MINICPM3,
        YOUTU,
        INTERNLM3,
        IQUESTCODER,
        CWM,
        HELIUM,
        OLMO,
        COHERE,
        COHERE2,
        COHERE2_MOE,
        GRANITE_SWA,
        EXAONE_MOE,
        FLEX_OLMO,
        HY_V3,
        LLAMA4,
        MELLUM,
        SOLAR_OPEN,
        QWEN3_NEXT,
        QWEN3_5,
        QWEN3_5_MOE,
        GRANITEMOEHYBRID,
        BAMBA,
        NEMOTRON_H,
        LFM2,
        LFM2_MOE,
        OLMO_HYBRID,
        KIMI_LINEAR,
    )
}

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
            f"{text_type!r} (text_config in config.json); {', '.join(FAMILIES)} are native.\n"
            "  Write model.backend: auto, or use a model with one of these."
        )
    near = get_close_matches(model_type, FAMILIES, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise CapabilityError(
        f"model.backend is native, and the model's config.json says model_type {model_type!r}; "
        f"{', '.join(FAMILIES)} are native.{hint}\n"
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
    return FAMILIES.get(native_type(hf_config) or "") or _language_model(hf_config)


def _refusal(family: Family, hf_config: HfConfig, adapters: bool) -> NotNativeError | None:
    """Why a native family does not compute this config.json; None for errors that it would raise
    with either backend."""
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
    """The family of the transformers backend. Raises `refusal` if transformers cannot build the
    model either."""
    try:
        _require_readable(hf_config)
        return replace(auto_family(hf_config), not_native=refusal.reasons)
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
    """The native family of the language model in a multimodal model, under the model's own type;
    None without one."""
    model_type = str(hf_config.get("model_type"))
    multimodal = MULTIMODAL.get(model_type)
    if multimodal is None:
        return None
    text_type = language_config(hf_config)["model_type"]
    family = FAMILIES.get(text_type) or LANGUAGE_MODELS.get(text_type)
    if family is None:
        return None

    def read(hf: HfConfig) -> DecoderConfig:
        config = family.read(language_config(hf))
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
