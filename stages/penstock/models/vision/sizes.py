"""Sizes of a vision part, and its rough work on images. No torch.

Parameters are counted from config.json by the matrices of each kind of tower, without biases and
norms.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.models.multimodal import language_config
from penstock.models.vision.types import VISION_TYPES, VisionType

# By tower, of fields that a vision_config leaves out: transformers' own.
DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "clip_vision_model": {"hidden_size": 768, "layers": 12, "inner": 3072, "patch": 32},
    "dinov2": {"hidden_size": 768, "layers": 12, "inner": 3072, "patch": 14},
    "ernie4_5_vl_moe": {"hidden_size": 1280, "layers": 32, "inner": 5120, "patch": 14},
    "glm4v": {"hidden_size": 1536, "layers": 24, "inner": 13696, "patch": 14, "outer": 4096},
    "idefics3_vision": {"hidden_size": 1152, "layers": 12, "inner": 3072, "patch": 32},
    "internvl_vision": {"hidden_size": 1024, "layers": 24, "inner": 4096, "patch": 14},
    "pixtral": {"hidden_size": 1024, "layers": 24, "inner": 4096, "patch": 16},
    "siglip_vision_model": {"hidden_size": 768, "layers": 12, "inner": 3072, "patch": 16},
    "qwen2_vl": {"hidden_size": 1280, "layers": 32, "inner": 5120, "patch": 14},
    "qwen2_5_vl": {"hidden_size": 3584, "layers": 32, "inner": 3420, "patch": 14},
    "qwen3_vl": {"hidden_size": 1152, "layers": 27, "inner": 4304, "patch": 16},
    "smolvlm_vision": {"hidden_size": 1152, "layers": 12, "inner": 3072, "patch": 32},
}

# Layers of Qwen2.5-VL's tower without windows, where vision_config names none.
FULL_ATTENTION = (7, 15, 23, 31)


@dataclass(frozen=True)
class VisionSizes:
    """Sizes of a vision part."""

    tower: int
    """Parameters of the tower."""
    projector: int
    layers: int
    width: int
    """Features of a patch in the tower."""
    patches_per_token: int
    """Patches of one feature."""
    attending_layers: int
    """Layers of the tower in which patches attend to all others of their image or tile, not to
    those of a window."""
    tile: int | None = None
    """Patches of a tile, which attend to one another only; None: all of an image do."""

    def flops_per_token(self, *, trains_tower: bool, trains_projector: bool) -> int:
        """FLOPs of the matrices for one image token in a forward and backward pass."""
        of_tower = 3 if trains_tower else 1
        # Gradients pass through a frozen projector only to a tower that is trained.
        of_projector = 3 if trains_projector else 2 if trains_tower else 1
        macs = of_tower * self.tower * self.patches_per_token + of_projector * self.projector
        return 2 * macs

    def attention_flops(self, *, trains_tower: bool) -> int:
        """FLOPs of attention for each pair of patches that attend to one another, in all layers, in
        a forward and backward pass."""
        return 4 * self.width * self.attending_layers * (3 if trains_tower else 1)


@dataclass(frozen=True)
class _Fields:
    """What the table below needs of a config.json."""

    hf: Mapping[str, Any]
    vision: Mapping[str, Any]
    kind: VisionType
    width: int
    inner: int
    patch: int
    outer: int
    """Width of the projector's outputs."""

    @property
    def side(self) -> int:
        """Side of the square of patches that become one feature."""
        name = "spatial_merge_size"
        return int(self.hf.get(name) or self.vision.get(name) or 2)

    @property
    def merged(self) -> int:
        """Width of such a square."""
        return self.width * self.side**2


Projector = Callable[[_Fields], tuple[int, int]]
"""The projector's parameters, and the patches of one feature."""


def _merger(fields: _Fields) -> tuple[int, int]:
    mergers = 1 + len(fields.vision.get("deepstack_visual_indexes") or fields.kind.deepstack)
    return mergers * fields.merged * (fields.merged + fields.outer), fields.side**2


def _shuffled_mlp(fields: _Fields) -> tuple[int, int]:
    shuffle_factor = round(1 / float(fields.hf.get("downsample_ratio") or 0.5))
    return fields.width * shuffle_factor**2 * fields.outer + fields.outer**2, shuffle_factor**2


def _shuffled_linear(fields: _Fields) -> tuple[int, int]:
    scale_factor = int(fields.hf.get("scale_factor") or 2)
    return fields.width * scale_factor**2 * fields.outer, scale_factor**2


def _pooled(fields: _Fields) -> tuple[int, int]:
    tokens = int(fields.hf.get("mm_tokens_per_image") or 256)
    return fields.width * fields.outer, _tile(fields, 224) // tokens or 1


def _tile(fields: _Fields, usual: int) -> int:
    # Patches of a tile, whose side in pixels is `usual` where vision_config has none.
    image = fields.vision.get("image_size") or usual
    return (int(image if isinstance(image, int) else image[0]) // fields.patch) ** 2


@dataclass(frozen=True)
class _SizeType:
    """How the vision part of a multimodal model type is counted."""

    projector: Projector
    tower: str = "clip_vision_model"
    """Whose defaults its tower has, if vision_config names no type."""
    width: str = "hidden_size"
    """The field of the tower's width."""
    outer: str = "out_hidden_size"
    """The field of the projector's width."""
    frames: int = 1
    """Images that a patch spans in time."""
    tile_size: int | None = 336
    """Pixels along a tile's side, where vision_config has none; None: images have no tiles."""
    gated: bool = False
    """Whether the tower's MLP has three matrices."""
    within: Callable[[_Fields], int] = lambda fields: fields.inner
    """Features within the tower's MLP."""
    full_attention: tuple[int, ...] | None = None
    """Layers without windows, where vision_config names none; None: there are no windows."""
    downsamples: bool = False
    """Whether the tower ends with a matrix that merges patches."""


def _mlp(f: _Fields) -> tuple[int, int]:
    return f.width * f.outer + f.outer**2, 1


_grid = partial(_SizeType, _merger, frames=2, tile_size=None)
_GLM = _SizeType(
    lambda f: (f.outer**2 + 3 * f.outer * f.inner, f.side**2),
    "glm4v",
    frames=2,
    tile_size=None,
    gated=True,
    # Its intermediate_size is that of the projector.
    within=lambda fields: fields.outer,
    downsamples=True,
)

# By the `model_type` of config.json.
SIZE_TYPES: Mapping[str, _SizeType] = {
    "ernie4_5_vl_moe": _SizeType(
        lambda f: (f.merged * (5 * f.merged + f.outer), f.side**2),
        "ernie4_5_vl_moe",
        tile_size=None,
    ),
    "gemma3": _SizeType(_pooled, "siglip_vision_model", tile_size=224),
    "glm4v": _GLM,
    "glm4v_moe": _GLM,
    "idefics3": _SizeType(_shuffled_linear, "idefics3_vision"),
    "internvl": _SizeType(_shuffled_mlp, "internvl_vision"),
    "llava": _SizeType(_mlp),
    "llava_next": _SizeType(_mlp),
    "llava_onevision": _SizeType(_mlp, "siglip_vision_model"),
    "mistral3": _SizeType(
        lambda f: (f.merged * f.width + f.width * f.outer + f.outer**2, f.side**2),
        "pixtral",
        tile_size=None,
    ),
    "qwen2_vl": _grid("qwen2_vl", width="embed_dim", outer="hidden_size"),
    "qwen2_5_vl": _grid("qwen2_5_vl", gated=True, full_attention=FULL_ATTENTION),
    "qwen3_5": _grid("qwen3_vl"),
    "qwen3_5_moe": _grid("qwen3_vl"),
    "qwen3_vl": _grid("qwen3_vl"),
    "qwen3_vl_moe": _grid("qwen3_vl"),
    "smolvlm": _SizeType(_shuffled_linear, "smolvlm_vision"),
}


def read_sizes(hf: Mapping[str, Any]) -> VisionSizes | None:
    """The sizes of the vision part of a config.json; None for a model that takes no images."""
    kind = SIZE_TYPES.get(str(hf.get("model_type")))
    if kind is None:
        return None
    vision = dict(hf.get("vision_config") or {})
    form = VISION_TYPES[str(hf["model_type"])]
    # The types of towers of their own have that of the whole.
    tower = kind.tower if form.form == "grid" else str(vision.get("model_type") or kind.tower)
    usual = DEFAULTS[tower]
    width = int(vision.get(kind.width) or usual["hidden_size"])
    layers = int(vision.get("depth") or vision.get("num_hidden_layers") or usual["layers"])
    ratio = vision.get("mlp_ratio")
    inner = int(vision.get("intermediate_size") or (ratio and ratio * width) or usual["inner"])
    patch = vision.get("patch_size") or usual["patch"]
    patch = int(patch if isinstance(patch, int) else patch[0])
    outer = vision.get(kind.outer) or usual.get("outer") or language_config(hf)["hidden_size"]
    fields = _Fields(hf, vision, form, width, inner, patch, int(outer))
    matrices = 3 if kind.gated or tower == "pixtral" else 2
    own = layers * (4 * width**2 + matrices * width * kind.within(fields))
    own += 3 * patch**2 * kind.frames * width
    if tower == "siglip_vision_model" and vision.get("vision_use_head", True):
        own += 4 * width**2 + 2 * width * inner  # pools patches, for nothing here
    if kind.downsamples:
        own += fields.merged * fields.outer
    full = layers
    if kind.full_attention:
        full = len(vision.get("fullatt_block_indexes") or kind.full_attention)
    projector, per_token = kind.projector(fields)
    tile = _tile(fields, kind.tile_size) if kind.tile_size else None
    return VisionSizes(own, projector, layers, width, per_token, full, tile)
