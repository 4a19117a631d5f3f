"""The processor of a model for a kind of media."""

from collections.abc import Callable, Mapping
from typing import Any

from penstock.media.audio_processor import load_audio_processor
from penstock.media.bounds import UNBOUNDED, MediaBounds
from penstock.media.kinds import AUDIO, IMAGE, VIDEO
from penstock.media.model_processor import ModelProcessor
from penstock.media.processor import load_image_processor
from penstock.media.video_processor import load_video_processor

Load = Callable[[str, str | None, Any, MediaBounds], ModelProcessor | None]

LOADERS: Mapping[str, Load] = {
    IMAGE.name: load_image_processor,
    AUDIO.name: lambda path, revision, tokenizer, _: load_audio_processor(
        path, revision, tokenizer
    ),
    VIDEO.name: load_video_processor,
}


def load_processor(
    kind: str, path: str, revision: str | None, tokenizer: Any, bounds: MediaBounds = UNBOUNDED
) -> ModelProcessor | None:
    """The processor for a kind of media in a folder or hub repository; None if it has none.

    Raises CapabilityError for processors that are not supported or cannot keep to `bounds`,
    ConfigError if the files cannot be used.
    """
    return LOADERS[kind](path, revision, tokenizer, bounds)
