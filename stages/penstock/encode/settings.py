"""Settings that determine the features of images, besides the images and the vision part."""

from typing import Any, Literal

from pydantic import Field

from penstock.config.schema.base import Settings
from penstock.config.schema.run import RunConfig, trains_projector


class EncodeSettings(Settings):
    """Cache identity of stored features."""

    dtype: Literal["float32", "bfloat16"]
    """Data type in which features are computed and stored."""

    projected: bool
    """Whether the projector's outputs are stored, or its inputs."""

    foundation: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Overrides of entries of the model's config.json."""


def encode_settings(run: RunConfig) -> EncodeSettings:
    """The settings of a run."""
    return EncodeSettings.model_validate(
        {
            "dtype": run.data.encode_dtype or run.train.computes_in,
            "projected": not trains_projector(run),
            "foundation": run.model.foundation,
        }
    )
