"""Sizes of the audio part of a tiny config."""

from collections.abc import Mapping
from typing import Any

MELS = "num_mel_bins"
"""The field that every config of an audio tower has."""

SIZES: Mapping[str, int] = {
    MELS: 8,
    "max_source_positions": 16,
    "output_dim": 64,
    "downsample_hidden_size": 8,
}

STACKED = ("voxtral_encoder",)
"""Types whose features of several positions are one: as many as the inner width is wider."""


def is_audio(values: Mapping[str, Any]) -> bool:
    """Whether this is the config of an audio tower."""
    return MELS in values


def shrink_audio(values: Mapping[str, Any], small: dict[str, Any]) -> None:
    """Make the sizes small that only configs of audio have, in place."""
    for name, size in SIZES.items():
        if isinstance(values.get(name), int):
            small[name] = min(values[name], size)
    if values.get("model_type") in STACKED:
        stacked = values["intermediate_size"] // values["hidden_size"]
        small["intermediate_size"] = stacked * small["hidden_size"]
