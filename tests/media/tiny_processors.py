"""Processors of several families with tiny images and byte tokenizers, made in code."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from penstock.media.processor import ImageProcessor, load_image_processor
from penstock.rows.tokenizer import load_tokenizer

CHATML = (
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n"
    "{%- if m.content is string -%}{{ m.content }}{%- else -%}{%- for c in m.content -%}"
    "{%- if c.type == 'image' or 'image' in c -%}IMAGE"
    "{%- elif c.type == 'text' -%}{{ c.text }}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "<|im_end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)

PARTS_ONLY = (
    "{%- for m in messages -%}{{ m.role|upper }}: "
    "{%- for c in m.content|selectattr('type', 'equalto', 'image') -%}<image>\n{%- endfor -%}"
    "{%- for c in m.content|selectattr('type', 'equalto', 'text') -%}{{ c.text }}{%- endfor -%}"
    "<|im_end|>{%- endfor -%}{%- if add_generation_prompt -%}ASSISTANT: {%- endif -%}"
)
"""As LLaVA's: contents are lists of parts only."""

CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
CLIP_STD = [0.26862954, 0.26130258, 0.27577711]
NORMAL = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
    "resample": 3,
    "rescale_factor": 1 / 255,
}

IMAGES = {
    "gemma3": "<start_of_image>",
    "glm4v": "<|begin_of_image|><|image|><|end_of_image|>",
    "ernie4_5_vl_moe": "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
    "idefics3": "<image>",
    "mistral3": "[IMG]",
}
"""What chat templates write for an image."""

FAMILIES = (
    *("qwen2_5_vl", "qwen3_vl", "llava", "llava_next", "llava_onevision", "gemma3"),
    *("idefics3", "glm4v", "ernie4_5_vl_moe"),
)


def write_processor(family: str, folder: Path, template: str | None = None) -> Path:
    """The tokenizer, chat template and processor files of a tiny model of a family."""
    folder.mkdir(parents=True, exist_ok=True)
    own, config, special, names, bos = _PARTS[family]()
    write_tokenizer(folder, special, names, bos=bos)
    (folder / "preprocessor_config.json").write_text(json.dumps(own))
    (folder / "processor_config.json").write_text(json.dumps(config))
    image = IMAGES.get(family, "<|vision_start|><|image_pad|><|vision_end|>")
    usual = PARTS_ONLY if family.startswith("llava") else CHATML.replace("IMAGE", image)
    (folder / "chat_template.jinja").write_text(template or usual)
    return folder


def load_processor(folder: Path) -> ImageProcessor:
    """The image processor in a folder that has one."""
    found = load_image_processor(str(folder), None, load_tokenizer(str(folder)))
    assert found is not None
    return found


def write_tokenizer(
    folder: Path,
    special: list[str],
    names: dict[str, str],
    *,
    bos: str | None,
    placed: tuple[int, str] | None = None,
) -> None:
    """A byte-level tokenizer, with special tokens and names for them; `placed` has its id."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if placed:
        alphabet.insert(*placed)
        special = [placed[1], *special]
    made = Tokenizer(models.BPE({char: at for at, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    tokens = ["<|im_start|>", "<|im_end|>", *special, *([bos] if bos else [])]
    made.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, made.token_to_id(bos))]
        )
    made.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        **({"bos_token": bos} if bos else {}),
        **({"extra_special_tokens": names} if names else {}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _qwen(patch: int, name: str) -> Any:
    own = {
        **NORMAL,
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": patch,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": (2 * patch) ** 2, "longest_edge": (6 * patch) ** 2},
    }
    special = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    return own, {"processor_class": name}, special, {}, None


def _glm4v() -> Any:
    own, config, _, *others = _qwen(14, "Glm4vProcessor")
    own["image_processor_type"] = "Glm4vImageProcessor"
    own["size"] = {"shortest_edge": 28**2, "longest_edge": 2 * 84**2}
    special = [f"<|{name}_of_{kind}|>" for kind in ("image", "video") for name in ("begin", "end")]
    return own, config, [*special, "<|image|>", "<|video|>"], *others


def _ernie() -> Any:
    own, config, *_ = _qwen(14, "Ernie4_5_VLMoeProcessor")
    own["image_processor_type"] = "Ernie4_5_VLMoeImageProcessor"
    del own["temporal_patch_size"]
    names = {
        f"{kind}{part}_token": f"<|{kind.upper()}{part.upper() or '_PLACEHOLDER'}|>"
        for kind in ("image", "video")
        for part in ("", "_start", "_end")
    }
    return own, config, [*names.values()], names, None


def _llava() -> Any:
    own = {
        **NORMAL,
        "image_processor_type": "CLIPImageProcessor",
        "do_center_crop": True,
        "crop_size": {"height": 28, "width": 28},
        "size": {"shortest_edge": 28},
    }
    config = {
        "processor_class": "LlavaProcessor",
        "patch_size": 14,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
        "image_token": "<image>",
    }
    return own, config, ["<image>"], {}, "<s>"


def _llava_next() -> Any:
    own, config, *others = _llava()
    tiles = {"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]}
    own = {**own, **tiles, "image_processor_type": "LlavaNextImageProcessor"}
    return own, {**config, "processor_class": "LlavaNextProcessor"}, *others


def _llava_onevision() -> Any:
    own = {
        **NORMAL,
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
        "size": {"height": 28, "width": 28},
    }
    config = {
        "processor_class": "LlavaOnevisionProcessor",
        "num_image_tokens": 4,
        "vision_feature_select_strategy": "full",
        "vision_aspect_ratio": "anyres_max_9",
    }
    return own, config, ["<image>", "<video>"], {}, None


def _gemma3() -> Any:
    own = {
        **NORMAL,
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 28, "width": 28},
        "resample": 2,
    }
    names = {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    }
    config = {"processor_class": "Gemma3Processor", "image_seq_length": 4}
    return own, config, list(names.values()), names, "<bos>"


def _idefics3() -> Any:
    own = {
        **NORMAL,
        "image_processor_type": "Idefics3ImageProcessor",
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "resample": 1,
        "size": {"longest_edge": 56},
        "max_image_size": {"longest_edge": 28},
    }
    crops = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    special = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *crops]
    return own, {"processor_class": "Idefics3Processor", "image_seq_len": 4}, special, {}, None


def _mistral3() -> Any:
    own = {
        **NORMAL,
        "image_processor_type": "PixtralImageProcessor",
        "patch_size": {"height": 14, "width": 14},
        "size": {"longest_edge": 112},
    }
    config = {"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2}
    return own, config, ["[IMG]", "[IMG_BREAK]", "[IMG_END]"], {}, "<s>"


_PARTS = {
    "idefics3": _idefics3,
    "mistral3": _mistral3,
    "qwen2_5_vl": lambda: _qwen(14, "Qwen2_5_VLProcessor"),
    "qwen3_vl": lambda: _qwen(16, "Qwen3VLProcessor"),
    "llava": _llava,
    "llava_next": _llava_next,
    "llava_onevision": _llava_onevision,
    "gemma3": _gemma3,
    "glm4v": _glm4v,
    "ernie4_5_vl_moe": _ernie,
}
