"""Sizes of a vision part, and its rough work on images. No torch.

Parameters are counted from config.json by the matrices of each kind of tower, without biases and
norms.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.models.multimodal import language_config
from penstock.models.vision.types import VISION_TYPES

GLM = {"glm4v", "glm4v_moe"}
GATED = {"pixtral", "qwen2_5_vl", *GLM}
"""Towers whose MLP has three matrices, by the model type of the tower or of the whole."""

_QWEN3 = {"hidden_size": 1152, "layers": 27, "inner": 4304, "patch": 16}
_GLM = {"hidden_size": 1536, "layers": 24, "inner": 13696, "patch": 14, "out_hidden_size": 4096}

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "clip_vision_model": {"hidden_size": 768, "layers": 12, "inner": 3072, "patch": 32},
    "dinov2": {"hidden_size": 768, "layers": 12, "inner": 3072, "patch": 14},
    "ernie4_5_vl_moe": {"hidden_size": 1280, "layers": 32, "inner": 5120, "patch": 14},
    **dict.fromkeys(GLM, _GLM),
    "idefics3_vision": {"hidden_size": 1152, "layers": 12, "inner": 3072, "patch": 32},
    "internvl_vision": {"hidden_size": 1024, "layers": 24, "inner": 4096, "patch": 14},
    "pixtral": {"hidden_size": 1024, "layers": 24, "inner": 4096, "patch": 16},
    "siglip_vision_model": {"hidden_size": 768, "layers": 12, "inner": 3072, "patch": 16},
    "qwen2_vl": {"hidden_size": 1280, "layers": 32, "inner": 5120, "patch": 14},
    "qwen2_5_vl": {"hidden_size": 3584, "layers": 32, "inner": 3420, "patch": 14},
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"), _QWEN3),
    "smolvlm_vision": {"hidden_size": 1152, "layers": 12, "inner": 3072, "patch": 32},
}
"""Of fields that a vision_config leaves out: transformers' own."""

TOWERS = {
    "gemma3": "siglip_vision_model",
    "idefics3": "idefics3_vision",
    "internvl": "internvl_vision",
    "llava_onevision": "siglip_vision_model",
    "mistral3": "pixtral",
    "smolvlm": "smolvlm_vision",
}
"""The tower where vision_config names none; otherwise CLIP's."""


FULL_ATTENTION = (7, 15, 23, 31)
"""Layers of Qwen2.5-VL's tower without windows, where vision_config names none."""

IMAGE_SIZE = 336
"""Side of a tile in pixels, where vision_config has none."""


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


def read_sizes(hf: Mapping[str, Any]) -> VisionSizes | None:
    """The sizes of the vision part of a config.json; None for a model that takes no images."""
    kind = VISION_TYPES.get(str(hf.get("model_type")))
    if kind is None:
        return None
    model_type, vision = str(hf["model_type"]), dict(hf.get("vision_config") or {})
    own = str(vision.get("model_type") or TOWERS.get(model_type, "clip_vision_model"))
    usual = DEFAULTS[model_type if kind.form == "grid" else own]
    width = vision.get("embed_dim") if model_type == "qwen2_vl" else vision.get("hidden_size")
    width = int(width or usual["hidden_size"])
    layers = int(vision.get("depth") or vision.get("num_hidden_layers") or usual["layers"])
    ratio = vision.get("mlp_ratio")
    inner = int(vision.get("intermediate_size") or (ratio and ratio * width) or usual["inner"])
    patch = vision.get("patch_size") or usual["patch"]
    patch = int(patch if isinstance(patch, int) else patch[0])
    matrices = 3 if {own, model_type} & GATED else 2
    has_frames = kind.form == "grid" and model_type != "ernie4_5_vl_moe"
    pixels = 3 * patch**2 * (2 if has_frames else 1)
    outer = vision.get("out_hidden_size") or usual.get("out_hidden_size")
    outer = int(outer or language_config(hf)["hidden_size"])
    outer = int((vision.get("hidden_size") if model_type == "qwen2_vl" else None) or outer)
    # GLM's blocks are as wide within as the projector, and its intermediate_size is the latter's.
    within = outer if model_type in GLM else inner
    tower = layers * (4 * width**2 + matrices * width * within) + pixels * width
    if own == "siglip_vision_model" and vision.get("vision_use_head", True):
        tower += 4 * width**2 + 2 * width * inner  # pools patches, for nothing here
    side = int(hf.get("spatial_merge_size") or vision.get("spatial_merge_size") or 2)
    merged = width * side**2
    full = layers
    if model_type == "qwen2_5_vl":
        full = len(vision.get("fullatt_block_indexes") or FULL_ATTENTION)
    image = vision.get("image_size") or IMAGE_SIZE
    tile = (int(image if isinstance(image, int) else image[0]) // patch) ** 2
    if model_type in GLM:
        projector = outer**2 + 3 * outer * inner
        return VisionSizes(tower + merged * outer, projector, layers, width, side**2, full)
    if model_type == "ernie4_5_vl_moe":
        return VisionSizes(tower, merged * (5 * merged + outer), layers, width, side**2, full)
    if kind.form == "grid":
        mergers = 1 + len(vision.get("deepstack_visual_indexes") or kind.deepstack)
        projector = mergers * merged * (merged + outer)
        return VisionSizes(tower, projector, layers, width, side**2, full)
    if model_type == "mistral3":
        projector = merged * width + width * outer + outer**2
        return VisionSizes(tower, projector, layers, width, side**2, full)
    if model_type == "internvl":
        side = round(1 / float(hf.get("downsample_ratio") or 0.5))
        projector = width * side**2 * outer + outer**2
        return VisionSizes(tower, projector, layers, width, side**2, full, tile)
    if kind.form == "crops":
        side = int(hf.get("scale_factor") or 2)
        return VisionSizes(tower, width * side**2 * outer, layers, width, side**2, full, tile)
    if model_type == "gemma3":
        patches = (int(vision.get("image_size") or 224) // patch) ** 2
        per_token = patches // int(hf.get("mm_tokens_per_image") or 256) or 1
        return VisionSizes(tower, width * outer, layers, width, per_token, full, patches)
    return VisionSizes(tower, width * outer + outer**2, layers, width, 1, full, tile)
