"""Sizes of the vision and audio parts of a tiny config, and ids of media tokens that are in its
vocabulary."""

from collections.abc import Mapping
from typing import Any

PATCHES = 4
"""Patches of a tiny image along its height and its width."""

_NAMES_BY_SIZE: Mapping[int, str] = {
    64: """
        out_hidden_size text_hidden_size output_hidden_size projection_dim projector_hidden_size
        adapter_out_dim projector_output_dim projector_input_dim projection_hidden_dim
        projection_hidden_size encoder_hidden_size downsample_hidden_size
        patch_embed_hidden_size image_text_hidden_size embed_dim output_dim vision_output_dim
        vision_hidden_size mm_hidden_size num_embeddings
    """,
    96: "mlp_dim alignment_intermediate_size projection_intermediate_size",
    4: "mm_tokens_per_image max_value_projector_patch_to_query_dict",
    32: "base_channels",
}
SIZES: Mapping[str, int] = {
    name: size for size, names in _NAMES_BY_SIZE.items() for name in names.split()
}
"""Sizes by their names in configs: widths that are those of another part, or between two parts,
come first."""

MERGED = "out_hidden_size"

INTERMEDIATE = "intermediate_layers_indices"

MELS = "num_mel_bins"
"""The field that every config of an audio tower has."""
AUDIO_SIZES: Mapping[str, int] = {
    MELS: 8,
    "max_source_positions": 16,
    "output_dim": 64,
    "downsample_hidden_size": 8,
}
# Types whose features of several positions are one: as many as the inner width is wider.
STACKED = ("voxtral_encoder",)

SIDES = ("image_size", "max_image_size", "max_img_size")
INDICES = ("indexes", "indices", "indexs", "target_layers", "summary_idxs")
TOKENS = ("token_id", "token_index", "_start_id", "_end_id", "_newline_id", "patch_id")
"""Ends of the names of token ids."""


def shrink_images(values: Mapping[str, Any], small: dict[str, Any], layers: int) -> None:
    """Make the sizes small that only configs with images have, in place."""
    for name, value in values.items():
        if name in SIZES and isinstance(value, int):
            small[name] = min(value, SIZES[name])
        elif name.endswith(INDICES) and isinstance(value, list | tuple) and layers:
            small[name] = sorted({min(int(layer), layers - 1) for layer in value})
        elif name == "vision_feature_layer" and isinstance(value, list | tuple):
            small[name] = [max(-2, min(int(layer), 1)) for layer in value]
        elif name == "vision_feature_layer" and isinstance(value, int):
            small[name] = max(-2, min(value, 1))
        elif name == "downsample_channels" and value:
            small[name] = [64] * len(value)
        elif name == "projector_patch_to_query_dict" and value:
            small[name] = {str(PATCHES**2): 4}
    if small.get(INTERMEDIATE):
        # Their features are side by side with those of the last layer.
        small["vision_output_dim"] = small["hidden_size"] * (1 + len(small[INTERMEDIATE]))
    _shrink_sides(values, small)
    _fit_merged(values, small)
    vision = small.get("vision_config")
    side = _side(vision.get("image_size")) if isinstance(vision, Mapping) else 0
    if small.get("image_grid_pinpoints") and side:
        # One tile beside the whole image.
        small["image_grid_pinpoints"] = [[side, side]]
    if isinstance(ratio := values.get("pixel_shuffle_ratio"), float):
        # Features of so many patches are one before a network of this width.
        small["intermediate_size"] = round(small["hidden_size"] / ratio**2)


def _shrink_sides(values: Mapping[str, Any], small: dict[str, Any]) -> None:
    patch = _side(values.get("patch_size"))
    merge = _side(values.get("spatial_merge_size")) or 1
    for name in SIDES:
        if patch and (image_side := _side(values.get(name))):
            size = min(image_side, PATCHES * patch)
            small[name] = size if isinstance(values[name], int) else [size, size]
    window = values.get("window_size")
    if patch and isinstance(window, int):
        # Of pixels, or of patches.
        small["window_size"] = 2 * merge * patch if window >= 2 * patch else 2


def _fit_merged(values: Mapping[str, Any], small: dict[str, Any]) -> None:
    # The width of several patches' features side by side.
    width = values.get(MERGED)
    vision, small_vision = (config.get("vision_config") for config in (values, small))
    if isinstance(width, int) and isinstance(vision, Mapping) and isinstance(small_vision, Mapping):
        hidden_size = vision.get("hidden_size")
        if hidden_size and width > hidden_size and width % hidden_size == 0:
            small[MERGED] = width // hidden_size * small_vision["hidden_size"]


def shrink_audio(values: Mapping[str, Any], small: dict[str, Any]) -> None:
    """Make the sizes small that only configs of audio have, in place."""
    for name, size in AUDIO_SIZES.items():
        if isinstance(values.get(name), int):
            small[name] = min(values[name], size)
    if values.get("model_type") in STACKED:
        stacked = values["intermediate_size"] // values["hidden_size"]
        small["intermediate_size"] = stacked * small["hidden_size"]


def fit_tokens(small: dict[str, Any]) -> None:
    """Give every token of images and the like an id of its own at the end of the vocabulary, in
    place."""
    text = small.get("text_config")
    text = text if isinstance(text, Mapping) else small
    size = text.get("vocab_size") or small.get("vocab_size")
    if not isinstance(size, int):
        return
    names = sorted(
        name
        for name, value in small.items()
        if name.endswith(TOKENS) and isinstance(value, int) and value >= size
    )
    for number, name in enumerate(names):
        small[name] = size - 1 - number


def _side(value: Any) -> int:
    # A number, or the first of two; 0 for another value.
    if isinstance(value, list | tuple) and value:
        value = value[0]
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
