"""Log-mel features of audio as the feature extractor of a model returns them, made of noise. M mel
bins, F frames."""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
Form = tuple[str, Callable[[int], Tensors]]
"""A name, and what makes the tensors of an image or of audio from its number."""

AUDIO_CONFIGS = ("audio_config", "encoder_config")
MASKS = ("feature_attention_mask", "input_features_mask")
STRIDE = 2
"""Frames of a position of the tower."""


def audio_forms(model: Any) -> Iterator[Form]:
    """Forms of audio, of which the first that a model takes is its own."""
    config = model.config
    audio = next((v for n in AUDIO_CONFIGS if (v := getattr(config, n, None))), config)
    mels = getattr(audio, "num_mel_bins", None) or 80
    frames = STRIDE * (getattr(audio, "max_source_positions", None) or 16)
    names = inspect.signature(model.forward).parameters
    for mask in MASKS:
        if mask in names:
            yield mask, partial(_masked, mask, mels, frames)
    yield "whole", lambda number: {"input_features": noise(number, 1, mels, frames)}


def _masked(mask: str, mels: int, frames: int, number: int) -> Tensors:
    """Features [1, M, F] of audio that is shorter for odd numbers."""
    length = frames - 8 * (number % 2)
    is_inside = torch.arange(frames)[None] < length
    return {"input_features": noise(number, 1, mels, frames), mask: is_inside.long()}


def noise(number: int, *shape: int) -> torch.Tensor:
    """Normal values, the same for the same number."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(shape, generator=generator)
