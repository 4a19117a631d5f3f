"""Audio of other formats and rates than the model's, by the packages soundfile and soxr: as
transformers' `load_audio` with the backend soundfile.

Rate, channels and length are read from the header, before anything is decoded; what is decoded is
averaged over channels block by block.
"""

import math
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.media.kinds import BadMedia

if TYPE_CHECKING:
    from soundfile import SoundFile

MAX_FRAMES = 86_400_000  # Maximum samples of a channel: 30 minutes at 48 kHz, 346 MB

MAX_CHANNELS = 16

BLOCK = 1 << 16  # Samples of a channel that are decoded at once

# libsndfile says as many or more of a file whose header does not tell its length.
UNKNOWN_FRAMES = 1 << 62

QUALITY = "HQ"  # That of transformers and librosa

Samples = npt.NDArray[np.float32]


class BadAudio(BadMedia):
    """The audio cannot be used."""


def decode_other(content: bytes, max_seconds: float) -> tuple[Samples, int]:
    """(the mean of all channels [samples] in [-1, 1], samples per second) of a file in a format
    that libsndfile reads. Raises BadAudio if it cannot be decoded, or is too long."""
    import soundfile  # noqa: PLC0415 - optional

    try:
        with soundfile.SoundFile(BytesIO(content)) as file:
            _check_header(file, max_seconds)
            blocks: list[Any] = [np.empty(0, np.float32)]
            while len(block := file.read(BLOCK, dtype="float32", always_2d=True)):
                blocks.append(block[:, 0] if file.channels == 1 else block.mean(axis=1))
            samples = np.concatenate(blocks)
            if len(samples) < file.frames:
                missing = file.frames - len(samples)
                raise BadAudio(f"it is truncated: {missing:,} samples are missing")
            return samples, file.samplerate
    except soundfile.LibsndfileError as error:
        reason = error.error_string.rstrip(".")
        raise BadAudio(f"it is not audio that can be decoded: {reason}") from error


def _check_header(file: "SoundFile", max_seconds: float) -> None:
    seconds = file.frames / file.samplerate
    if file.channels > MAX_CHANNELS:
        raise BadAudio(f"it has {file.channels} channels; {MAX_CHANNELS} are allowed")
    if not file.frames:
        raise BadAudio("it has no samples")
    if file.frames >= UNKNOWN_FRAMES:
        raise BadAudio("its header does not tell its length; write it again (ffmpeg -i IN OUT)")
    if seconds > max_seconds:
        raise BadAudio(f"it is {seconds:,.0f} s long; {max_seconds:,} are allowed")
    if file.frames > MAX_FRAMES:
        raise BadAudio(f"it has {file.frames:,} samples; {MAX_FRAMES:,} are allowed")


def resample(samples: Samples, rate: int, to: int) -> Samples:
    """The samples at another rate: `ceil(len(samples) * to / rate)` of them."""
    import soxr  # noqa: PLC0415 - optional

    resampled = soxr.resample(samples, rate, to, quality=QUALITY)
    # The length to which librosa.resample cuts or pads; soxr alone may give a sample more or less.
    out = np.zeros(math.ceil(len(samples) * to / rate), np.float32)
    out[: len(resampled)] = resampled[: len(out)]
    return out
