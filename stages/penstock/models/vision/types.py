"""The multimodal model types whose images and videos are trained on, and what is known of each. No
torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.core.errors import CapabilityError
from penstock.models.multimodal import BACKBONE, MULTIMODAL, language_config

Mrope = Literal["chunked", "interleaved", "pairs"]
"""How the pairs of rotated features are divided among the axes of RoPE positions (time, height,
width): in sections, by turns, or height and width by turns and then time, whose section is last."""

Form = Literal["crops", "grid", "native", "square", "tiles"]
"""What the image processor returns: `crops` [images, crops, C, H, W] of one size, padded with crops
of zeros to the largest number; `grid` patches [patches, features] with `image_grid_thw`; `native`
images of any size, padded to the largest, with `image_sizes`; `square` images of one size [images,
C, H, W]; `tiles` of such a size [images, tiles, C, H, W] with `image_sizes`."""

VISION = "vision."
"""Beginning of the names of the vision part's parameters in the model; the rest is their name in
transformers' class, after `model.`."""

MODULES = (
    "connector",
    "image_newline",
    "multi_modal_projector",
    "resampler_model",
    "vision_model",
    "vision_tower",
    "visual",
)
"""The vision part's modules and parameters at the top of transformers' class."""

# Beginnings of the names of its tensors in the model, and in checkpoints.
VISION_NAMES = (VISION, *(f"{BACKBONE}{module}" for module in MODULES))


@dataclass(frozen=True)
class VideoType:
    """The videos of a multimodal model type, which its vision tower computes as images of several
    frames."""

    token_id: int
    """Where config.json has none."""
    is_split: bool = False
    """Whether text stands between its temporal patches, each of which then has the positions of an
    image."""
    tokens_per_second: int | None = None
    """Where vision_config has none. RoPE positions along time are this times seconds; None: they
    are temporal patches."""


@dataclass(frozen=True)
class VisionType:
    """The vision part of a multimodal model type."""

    image_token_id: int
    """Where config.json has none."""
    form: Form
    projector: tuple[str, ...] = ("multi_modal_projector.",)
    """Beginnings of the names of the tensors that map features to the language model's width; the
    others are of the vision tower."""
    mrope: Mrope | None = None
    mrope_section: tuple[int, ...] = ()
    """Where config.json has none."""
    deepstack: tuple[int, ...] = ()
    """The tower's layers whose features are added after the first decoder layers, where config.json
    names none (Meng et al. 2024, "DeepStack")."""
    bidirectional: bool = False
    """Whether the tokens of an image attend to one another in both directions."""

    video: "VideoType | None" = None
    """How videos are trained on; None: they are not."""

    modality_tokens: Mapping[str, int] = field(default_factory=dict[str, int])
    """Fields of config.json with the ids of tokens that have the experts of images, besides the
    image token, and their defaults."""


_TILES = ("multi_modal_projector.", "image_newline")

_ERNIE_TOKENS = {
    "image_start_token_id": 101304,
    "image_end_token_id": 101305,
    "video_token_id": 103367,
    "video_start_token_id": 101306,
    "video_end_token_id": 101307,
}
_GLM = "grid", ("visual.merger.",), "chunked", (8, 12, 12)
_QWEN2 = "grid", ("visual.merger.",), "chunked", (16, 24, 24)
_QWEN3_5 = VisionType(
    248056,
    "grid",
    ("visual.merger.",),
    "interleaved",
    (11, 11, 10),
    video=VideoType(248057, is_split=True),
)
_QWEN3_VL = VisionType(
    151655,
    "grid",
    ("visual.merger.", "visual.deepstack_merger_list."),
    "interleaved",
    (24, 20, 20),
    (8, 16, 24),
    video=VideoType(151656, is_split=True),
)

VISION_TYPES: Mapping[str, VisionType] = {
    "ernie4_5_vl_moe": VisionType(
        100295,
        "grid",
        ("resampler_model.",),
        "pairs",
        (22, 22, 20),
        modality_tokens=_ERNIE_TOKENS,
    ),
    "gemma3": VisionType(262144, "square", bidirectional=True),
    "glm4v": VisionType(151343, *_GLM),
    "glm4v_moe": VisionType(151363, *_GLM),
    "idefics3": VisionType(128257, "crops", ("connector.",)),
    "internvl": VisionType(151667, "square"),
    "llava": VisionType(32000, "square"),
    "llava_next": VisionType(32000, "tiles", _TILES),
    "llava_onevision": VisionType(151646, "tiles", _TILES),
    "mistral3": VisionType(10, "native"),
    "qwen2_vl": VisionType(151655, *_QWEN2, video=VideoType(151656)),
    "qwen2_5_vl": VisionType(151655, *_QWEN2, video=VideoType(151656, tokens_per_second=4)),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": _QWEN3_VL,
    "smolvlm": VisionType(128257, "crops", ("connector.",)),
}
"""By the `model_type` of config.json."""

WHY_NOT: Mapping[str, str] = {
    "gemma4": "its vision part is in another form",
    "llama4": "its vision part is in another form",
}
"""The other multimodal types, and why they are trained on text alone."""


def is_vision(name: str) -> bool:
    """Whether a module or tensor, by its name in the model or a checkpoint, is of a vision part."""
    return name.startswith(VISION_NAMES)


@dataclass(frozen=True)
class VisionConfig:
    """The vision part of one model."""

    hf_config: Mapping[str, Any]
    """The config.json of the whole model."""
    type: VisionType
    image_token_id: int
    video_token_id: int | None = None
    """None: the model is not trained on videos."""
    tokens_per_second: int | None = None
    """Positions along time of a second of video; None: they are temporal patches."""
    rope_axes: tuple[int, ...] | None = None
    """The axis (0 time, 1 height, 2 width) of each pair of rotated features; None: positions have
    one axis."""
    merge_size: int = 1
    """Patches per feature along height and width."""
    num_deepstack: int = 0
    """Decoder layers after which features are added."""
    modality_ids: tuple[int, ...] = ()
    """Ids of the tokens that have the experts of images; empty: all tokens have the same."""

    @property
    def backbone(self) -> str:
        """The backbone of the language model in transformers' class, with a dot at the end."""
        return MULTIMODAL[str(self.hf_config["model_type"])].backbone

    def is_projector(self, name: str) -> bool:
        """Whether a parameter of the vision part (without `vision.`) belongs to the projector."""
        return name.startswith(self.type.projector)


def read_vision(hf: Mapping[str, Any]) -> VisionConfig:
    """The vision part of a config.json.

    Raises CapabilityError for a model that does not take images here.
    """
    model_type = str(hf.get("model_type"))
    kind = VISION_TYPES.get(model_type)
    if kind is None:
        why = WHY_NOT.get(model_type, "it is a text model")
        reason = "trained on text alone" if model_type in MULTIMODAL else "not multimodal"
        start = "Use" if model_type not in MULTIMODAL else "Write model.backend: transformers; use"
        raise CapabilityError(
            f"the data has images, and models of type {model_type} are {reason}: {why}.\n"
            f"  {start} a model of one of these types: {', '.join(VISION_TYPES)}; or data without"
            " images."
        )
    tower: Mapping[str, Any] = hf.get("vision_config") or {}
    token_ids = (hf.get(name) for name in ("image_token_id", "image_token_index"))
    token = next((token_id for token_id in token_ids if token_id is not None), kind.image_token_id)
    deepstack = tower.get("deepstack_visual_indexes") or kind.deepstack
    per_second = kind.video.tokens_per_second if kind.video else None
    modality_ids: tuple[int, ...] = ()
    if kind.modality_tokens:
        more = (hf.get(name, default) for name, default in kind.modality_tokens.items())
        modality_ids = (int(token), *(int(token_id) for token_id in more if token_id is not None))
    return VisionConfig(
        hf,
        kind,
        int(token),
        int(hf.get("video_token_id") or kind.video.token_id) if kind.video else None,
        int(tower.get("tokens_per_second") or per_second) if per_second is not None else None,
        _rope_axes(hf, kind),
        int(tower.get("spatial_merge_size") or 2) if kind.form == "grid" else 1,
        len(deepstack) if kind.deepstack else 0,
        modality_ids,
    )


def _rope_axes(hf: Mapping[str, Any], kind: VisionType) -> tuple[int, ...] | None:
    if kind.mrope is None:
        return None
    text = language_config(hf)
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    sections = [int(size) for size in rope.get("mrope_section") or kind.mrope_section]
    if kind.mrope == "chunked":
        return tuple(axis % 3 for axis, size in enumerate(sections) for _ in range(size))
    if kind.mrope == "pairs":
        height, width, time = sections
        return (1, 2) * ((height + width) // 2) + (0,) * time
    # Time has what height and width leave: every third pair, and all after their sections.
    axes = [0] * sum(sections)
    for axis in (1, 2):
        for pair in range(axis, min(3 * sections[axis], len(axes)), 3):
            axes[pair] = axis
    return tuple(axes)
