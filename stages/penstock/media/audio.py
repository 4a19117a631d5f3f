"""Decode audio to samples of one channel. Rate and length are read from the header, before anything
is decoded. WAV files at the model's rate need no further package."""

import struct
from dataclasses import dataclass

import numpy as np

from penstock.media.audio_codecs import BadAudio, Samples, decode_other, resample
from penstock.media.kinds import AUDIO_EXTRA, MAX_BYTES, MissingPackages, has_extra

MAX_SECONDS = 1_800  # Maximum length of audio

# Values of `wFormatTag` in a WAV file; of the last, the first two bytes of `SubFormat` say it.
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE


class OtherFormat(BadAudio):
    """It is no WAV file of samples."""


@dataclass(frozen=True)
class WavHeader:
    """What the header of a WAV file says."""

    is_float: bool
    channels: int
    rate: int  # Samples of a channel per second
    bits: int  # Of a sample
    start: int  # Byte at which the samples begin
    frames: int  # Samples of each channel

    @property
    def seconds(self) -> float:
        return self.frames / self.rate


def read_wav_header(content: bytes) -> WavHeader:
    """The header of a WAV file. Raises BadAudio if it is too long or damaged, OtherFormat if it is
    none, or of another encoding."""
    if not content:
        raise BadAudio("it is empty")
    if len(content) > MAX_BYTES:
        raise BadAudio(f"it has {len(content):,} bytes; {MAX_BYTES:,} are allowed")
    if content[:4] != b"RIFF" or content[8:12] != b"WAVE":
        raise OtherFormat(f"it is {_name_content(content)}")
    chunks = _find_chunks(content)
    if b"fmt " not in chunks or b"data" not in chunks or chunks[b"fmt "][1] < 16:
        raise BadAudio("it is a damaged WAV file: it has no format or no samples")
    start_of_format, size = chunks[b"fmt "]
    tag, channels, rate, _, align, bits = struct.unpack_from("<HHIIHH", content, start_of_format)
    if tag == EXTENSIBLE and size >= 26:
        (tag,) = struct.unpack_from("<H", content, start_of_format + 24)
    widths = {PCM: (8, 16, 24, 32), FLOAT: (32, 64)}
    if bits not in widths.get(tag, ()):
        raise OtherFormat(f"it is a WAV file of encoding {tag} with {bits} bits")
    if not channels or not rate or align != channels * bits // 8:
        raise BadAudio("it is a damaged WAV file: its format says nothing")
    start, size = chunks[b"data"]
    if start + size > len(content):
        raise BadAudio(f"it is truncated: {start + size - len(content):,} bytes are missing")
    header = WavHeader(tag == FLOAT, channels, rate, bits, start, size // align)
    if not header.frames:
        raise BadAudio("it has no samples")
    if header.seconds > MAX_SECONDS:
        raise BadAudio(f"it is {header.seconds:,.0f} s long; {MAX_SECONDS:,} are allowed")
    return header


def decode_audio(content: bytes, rate: int) -> Samples:
    """The samples in [-1, 1] at `rate` Hz; of several channels their mean. Raises BadAudio if it
    cannot be decoded, and MissingPackages as `require_packages`."""
    require_packages(content, rate)
    try:
        header = read_wav_header(content)
        samples, own = _to_float(content, header, header.frames * header.channels), header.rate
        if header.channels > 1:
            samples = samples.reshape(-1, header.channels).mean(axis=1, dtype=np.float32)
    except OtherFormat:
        samples, own = decode_other(content, MAX_SECONDS)
    if not np.isfinite(samples).all():
        raise BadAudio("it has samples that are not finite")
    return samples if own == rate else resample(samples, own, rate)


def require_packages(content: bytes, rate: int) -> None:
    """Raise MissingPackages without those that decode and resample this audio: WAV files at `rate`
    need none."""
    try:
        own = read_wav_header(content).rate
        why = f"its sampling rate is {own} Hz, and the model's processor takes {rate} Hz"
    except OtherFormat as error:
        own, why = None, str(error)
    except BadAudio:  # which decoding it says
        return
    if own != rate and not has_extra(AUDIO_EXTRA):
        raise MissingPackages(f"{why}, which needs further packages", AUDIO_EXTRA)


def _to_float(content: bytes, header: WavHeader, count: int) -> Samples:
    # Integers are divided by the largest amplitude, as libsndfile does.
    if header.is_float:
        kind = np.dtype(f"<f{header.bits // 8}")
        return np.frombuffer(content, kind, count, header.start).astype(np.float32)
    if header.bits == 8:
        unsigned = np.frombuffer(content, np.uint8, count, header.start)
        return (unsigned.astype(np.float32) - 128) / np.float32(128)
    if header.bits == 24:
        raw = np.frombuffer(content, np.uint8, 3 * count, header.start).reshape(-1, 3)
        wide = np.zeros((count, 4), np.uint8)
        wide[:, 1:] = raw  # the lowest byte is 0, so the sign is that of the highest
        signed = wide.view("<i4")[:, 0]
        return (signed.astype(np.float64) / 2**31).astype(np.float32)
    kind = np.dtype(f"<i{header.bits // 8}")
    signed = np.frombuffer(content, kind, count, header.start)
    return (signed.astype(np.float64) / 2 ** (header.bits - 1)).astype(np.float32)


def _find_chunks(content: bytes) -> dict[bytes, tuple[int, int]]:
    """(first byte, number of bytes) of the first chunk of each name in a RIFF file."""
    chunks: dict[bytes, tuple[int, int]] = {}
    offset = 12
    while offset + 8 <= len(content):
        name, size = struct.unpack_from("<4sI", content, offset)
        chunks.setdefault(name, (offset + 8, size))
        # RIFF pads every chunk to an even length.
        offset += 8 + size + size % 2
    return chunks


def _name_content(content: bytes) -> str:
    for name, starts in {
        "FLAC": (b"fLaC",),
        "MP3": (b"ID3", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2"),
        "Ogg": (b"OggS",),
    }.items():
        if content.startswith(starts):
            return name
    return "MP4" if content[4:8] == b"ftyp" else "no WAV file"
