"""A tiny model of every image-text type of transformers, and of types with audio, from its own
config class, and documents with images or audio of noise for it."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from penstock.core.files import read_json
from penstock.models.automodel.family import auto_family
from penstock.models.automodel.media.inputs import join_media
from penstock.models.automodel.media.synthetic import Kind, find_maker
from penstock.models.automodel.media.traits import Document, document, token_ids
from penstock.models.automodel.tiny_config import shrink
from penstock.rows.collate import MicroBatch
from penstock.rows.image_batch import ImageBatch
from penstock.rows.tokenizer import load_tokenizer
from tests.engine.automodel.tiny_models import without_dropout

IMAGE_TYPES = sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
"""As the installed transformers lists them."""


def _mrope(sections: list[int], **more: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections, **more}
    return {"text_config": {"rope_parameters": rope}}


AUDIO_TYPES = ("qwen2_audio", "voxtral")
"""Types that take audio and no images."""

WITH_AUDIO = "+audio"
"""End of the name, and folder, of a type that takes images too and is examined with audio."""

AUDIO_EXAMINED = (
    *AUDIO_TYPES,
    f"qwen2_5_omni_thinker{WITH_AUDIO}",
    f"qwen3_omni_moe_thinker{WITH_AUDIO}",
)
"""Types that are examined with audio."""

OVERRIDES: Mapping[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "paddleocr_vl"), _mrope([16, 24, 24])),
    **dict.fromkeys(("glm4v", "glm46v", "glmga"), _mrope([8, 12, 12], partial_rotary_factor=0.5)),
    "glm4v_moe": _mrope([4, 4, 3], partial_rotary_factor=0.5),
    "glm_ocr": _mrope([4, 6, 6], partial_rotary_factor=0.5),
    "ernie4_5_vl_moe": _mrope([22, 22, 20]),
    "granite4_vision": {
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [0, 1],
        "downsample_rate": "2/4",
    },
    "hunyuan_vl": {
        "text_config": {
            "head_dim": 128,
            **_mrope([16, 16, 16, 16], alpha=1000.0)["text_config"],
        }
    },
    "cohere_compass": {
        "text_config": {
            "rope_parameters": dict.fromkeys(
                ("full_attention", "sliding_attention"),
                _mrope([16, 24, 24])["text_config"]["rope_parameters"],
            )
        }
    },
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense"] * 12}},
    "nemotron_h_omni": {"image_token_id": 310},
    "step3p7": {"text_config": {"sliding_window": 4}},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 300, **_mrope([16, 24, 24])},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 300},
    "voxtral": {"audio_token_id": 24},
}
"""What the default config of a type lacks to be built."""

ARGUMENTS: Mapping[str, dict[str, Any]] = {
    "gemma4": {"vision_config": {"model_type": "gemma4_vision"}},
    "gemma4_unified": {"vision_config": {"model_type": "gemma4_unified_vision"}},
}
"""Arguments of a config class whose default has no vision part."""

_TIMM = "its vision tower is one of the library timm, which is not installed"
_FEATURES = "it has no get_image_features: its images are not features at image tokens"
_ENCODER = "it is an encoder-decoder: its encoder reads the tokens"
_CODES = "its images are discrete codes, which a tiny model does not tell from others"
_STRIP = "its processor joins images along their width, not one after another"

NOT_BUILT: Mapping[str, str] = {
    "florence2": _ENCODER,
    "pix2struct": _ENCODER,
    "pp_formulanet": _ENCODER,
    "t5gemma2": _ENCODER,
    "udop": _ENCODER,
    "vision-encoder-decoder": _ENCODER,
    "diffusion_gemma": "it predicts blocks of tokens by diffusion",
    "dots3_note": "its sizes must agree across layers of several kinds; no tiny config fits",
    "qwen4_exp": "its indexer has no default sizes; no tiny config fits",
    "blip": _FEATURES,
    "blip-2": "its forward takes no text without images",
    "chameleon": _CODES,
    "emu3": _CODES,
    "molmo2": "its images are pooled by indices that its processor makes of all images",
    "shieldgemma2": "its files have names of another class, which are not converted",
    "evolla": "it reads proteins, and transformers does not build it as an image-text model",
    "fast_vlm": _TIMM,
    "gemma3n": _TIMM,
    "git": "transformers lists it as a causal language model, which is trained on text",
    "idefics": _FEATURES,
    "inkling_mm_model": "it needs the library scipy, which is not installed",
    "instructblip": "its images are read together with tokens of a second tokenizer",
    "instructblipvideo": "it reads videos, together with tokens of a second tokenizer",
    "kosmos-2": _FEATURES,
    "kosmos-2.5": _FEATURES,
    "minicpm_ocr": _STRIP,
    "minicpmv4_6": _STRIP,
    "minicpmv4_7": _STRIP,
    "mistral4": "it is a text model",
    "muse_spark": "tables of its audio part, which are not made small: no tiny model to examine",
    "perception_lm": _TIMM,
    "pi0": "it predicts actions of robots, not tokens",
}
"""Types that are not examined, and why."""


def tiny_image_config(model_type: str) -> Any:
    """The default config of this type, made small and without dropout."""
    model_type = model_type.removesuffix(WITH_AUDIO)
    config = transformers.CONFIG_MAPPING[model_type](**ARGUMENTS.get(model_type, {}))
    values = merged(config.to_dict(), OVERRIDES.get(model_type, {}))
    return type(config).from_dict(without_dropout(shrink(values)))


def fixed_parameters(model_type: str) -> list[str]:
    """The parameters that the class itself does not train, such as sines of positions."""
    auto = transformers.AutoModelForMultimodalLM
    model = auto.from_config(tiny_image_config(model_type), dtype=torch.float32)
    return [name for name, one in model.named_parameters() if not one.requires_grad]


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The values with changes, also of nested mappings."""
    nested = {
        name: merged(values[name], change)
        for name, change in changes.items()
        if isinstance(change, Mapping) and isinstance(values.get(name), Mapping)
    }
    return {**values, **changes, **nested}


def write_image_model(folder: Path, model_type: str, *, noise: float = 0.02) -> Any:
    """Save a tiny model with random weights, of which no tensor is ones or zeros, a tokenizer and
    the file of an image processor."""
    torch.manual_seed(0)
    config = tiny_image_config(model_type)
    model = transformers.AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    model.save_pretrained(folder)
    load_tokenizer("builtin:bytes").save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"size": {"height": 32}}')
    # Described once: ranks that begin at once would each take those seconds.
    auto_family(read_json(folder / "config.json"))
    return model


def load(folder: Path) -> Any:
    """The model in a folder, by transformers."""
    auto = transformers.AutoModelForMultimodalLM
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    model.examined_with_audio = any(part.endswith(WITH_AUDIO) for part in folder.parts)
    return model


def kind_of(model: Any) -> Kind:
    """The kind of media with which a model is examined."""
    has_audio = getattr(model, "examined_with_audio", False)
    return "audio" if has_audio or model.config.model_type in AUDIO_TYPES else "image"


def documents_of(model: Any, numbers: Sequence[int], kind: Kind | None = None) -> list[Document]:
    """Documents with so many images (or audio) each, of different sizes where the model takes
    them."""
    maker = find_maker(model, kind or kind_of(model))
    found, at = [], 0
    for number in numbers:
        found.append(document(model, maker, [*range(at, at + number)], seed=at))
        at += number
    return found


def labels(model: Any, one: Document) -> torch.Tensor:
    """The next tokens [L], -100 where that is a token of media or there is none."""
    following = torch.cat((one.ids_L[1:], torch.tensor([-100])))
    tokens = torch.tensor([*token_ids(model.config).values()])
    return following.masked_fill(torch.isin(following, tokens), -100)


def micro_batch(model: Any, numbers: Sequence[int], padding: int = 0) -> MicroBatch:
    """Documents in one row, with tokens of padding behind them."""
    documents = documents_of(model, numbers)
    ids = [one.ids_L for one in documents]
    targets = [labels(model, one) for one in documents]
    used = sum(map(len, ids))
    if padding:
        ids.append(torch.zeros(padding, dtype=torch.int64))
        targets.append(torch.full((padding,), -100))
    lengths = tuple(map(len, ids))
    return MicroBatch(
        torch.cat(ids),
        torch.cat(targets),
        torch.cat([torch.arange(length) for length in lengths]),
        lengths,
        used,
        int((torch.cat(targets) != -100).sum()),
        ((0, used),),
        images=image_batch(model, documents),
    )


def image_batch(model: Any, documents: Sequence[Document]) -> ImageBatch | None:
    """The images of the documents; None without any."""
    media = [each for one in documents for each in one.media]
    if not media:
        return None
    count = find_maker(model, kind_of(model)).count
    return ImageBatch(join_media(media), tuple(map(count, media)))


@cache
def reference(folder: Path) -> Any:
    """The model in a folder, loaded once in a process."""
    return load(folder)
