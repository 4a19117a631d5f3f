"""What is decoded of audio, and features as the model's processor gives them."""

import io
import tracemalloc
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
from transformers import AutoProcessor
from transformers.audio_utils import load_audio

from penstock.media import audio as audio_module
from penstock.media import audio_codecs
from penstock.media.audio import MAX_SECONDS, decode_audio, read_wav_header
from penstock.media.audio_codecs import BadAudio
from penstock.media.kinds import MissingPackages
from tests.media.sounds import (
    MELS,
    RATE,
    float_wav,
    load_processor,
    tone,
    wav,
    write_audio_processor,
)

SAMPLES = tone(0)
FLOATS = SAMPLES.astype(np.float32) / 32768


def in_24_bits() -> bytes:
    wide = (SAMPLES.astype("<i4") << 8).view(np.uint8).reshape(-1, 4)[:, :3]
    whole = bytearray(wav(SAMPLES.astype("<i4")))
    header = whole[:44]
    header[28:36] = np.array([RATE * 3, 3 | 24 << 16], "<u4").tobytes()
    content = wide.tobytes()
    header[40:44] = len(content).to_bytes(4, "little")
    return bytes(header) + content


@pytest.mark.parametrize(
    "content",
    [
        wav(SAMPLES),
        in_24_bits(),
        wav(SAMPLES.astype("<i4") << 16),
        float_wav(FLOATS),
        float_wav(FLOATS, extensible=True),
        float_wav(FLOATS.astype(np.float64)),
        wav(np.repeat(SAMPLES, 2), channels=2),
    ],
    ids=["16 bits", "24 bits", "32 bits", "float", "extensible", "double", "stereo"],
)
def test_every_encoding_of_a_wav_file_gives_the_same_samples(content):
    found = decode_audio(content, RATE)
    assert found.dtype == np.float32
    assert found.tobytes() == FLOATS.tobytes()


def test_eight_bits_are_unsigned_and_channels_are_averaged():
    assert decode_audio(wav(np.array([0, 128, 255], np.uint8)), RATE).tolist() == [-1, 0, 127 / 128]
    both = np.array([16384, 0, -16384, -16384], np.int16)
    assert decode_audio(wav(both, channels=2), RATE).tolist() == [0.25, -0.5]


BAD = {
    "empty": (b"", "it is empty"),
    "text": (b"hello", "not audio that can be decoded: Format not recognised"),
    "truncated": (wav(SAMPLES)[:-100], "truncated: 100 bytes are missing"),
    "header": (wav(SAMPLES)[:20], "damaged WAV file"),
    "silent": (wav(SAMPLES[:0]), "no samples"),
    "not finite": (float_wav(np.array([0.0, np.nan], np.float32)), "not finite"),
    "encoding": (wav(SAMPLES)[:20] + b"\x99" + wav(SAMPLES)[21:], "not audio that can be decoded"),
}


@pytest.mark.parametrize(("content", "why"), BAD.values(), ids=BAD.keys())
def test_what_cannot_be_decoded_is_refused_with_its_reason(content, why):
    with pytest.raises(BadAudio, match=why):
        decode_audio(content, RATE)


HIGH = 44_100


def sines(channels: int, rate: int = HIGH, seconds: float = 0.5) -> np.ndarray:
    """Channels [samples, channels] of a tone of 1 kHz, each of another loudness, float32."""
    at = np.arange(round(seconds * rate)) / rate
    loud = 0.8 / np.arange(1, channels + 1)
    return (np.sin(2 * np.pi * 1_000 * at)[:, None] * loud).astype(np.float32)


def encoded(samples: np.ndarray, rate: int = HIGH, **options: Any) -> bytes:
    """A file of another format, by soundfile."""
    out = io.BytesIO()
    soundfile.write(out, samples, rate, **options)
    return out.getvalue()


FORMATS = {
    "FLAC": {"format": "FLAC", "subtype": "PCM_24"},
    "Vorbis": {"format": "OGG", "subtype": "VORBIS"},
    "Opus": {"format": "OGG", "subtype": "OPUS"},
    "MP3": {"format": "MP3"},
    "mu-law": {"format": "WAV", "subtype": "ULAW"},
}


@pytest.mark.parametrize("name", FORMATS)
def test_other_formats_are_decoded_averaged_and_resampled_as_transformers_does(tmp_path, name):
    rate = 48_000 if name == "Opus" else HIGH
    content = encoded(sines(2, rate), rate, **FORMATS[name])
    (tmp_path / "sound").write_bytes(content)
    found = decode_audio(content, RATE)
    wanted = load_audio(str(tmp_path / "sound"), RATE, backend="soundfile")
    assert (found.dtype, found.tobytes()) == (np.float32, wanted.tobytes())
    assert len(found) == RATE // 2
    # A tone of 1 kHz is one, with the mean of the loudness of the channels.
    spectrum = np.abs(np.fft.rfft(found[1_000:7_000])) / 3_000
    assert np.argmax(spectrum) * RATE / 6_000 == 1_000
    assert spectrum.max() == pytest.approx(0.6, rel=0.03)


@pytest.mark.parametrize("rate", [8_000, 22_050, 48_000])
def test_wav_files_of_any_rate_and_channels_are_resampled(rate):
    samples = sines(6, rate)
    content = encoded(samples, rate, format="WAV", subtype="PCM_16")
    read, _ = soundfile.read(io.BytesIO(content), dtype="float32")
    wanted = soxr.resample(read.mean(axis=1), rate, RATE, quality="HQ")
    assert decode_audio(content, RATE).tobytes() == wanted.tobytes()


def lying_flac(samples: int) -> bytes:
    """A small file whose header claims so many samples: 36 bits, 21 bytes from the start."""
    content = bytearray(encoded(sines(1), format="FLAC"))
    content[21] = (content[21] & 0xF0) | (samples >> 32)
    content[22:26] = (samples & 0xFFFFFFFF).to_bytes(4, "big")
    return bytes(content)


REFUSED = {
    "hours": (lambda: lying_flac(HIGH * 3_600), "it is 3,600 s long; 1,800 are allowed"),
    "channels": (
        lambda: encoded(sines(17), format="AIFF", subtype="PCM_16"),
        "it has 17 channels; 16 are allowed",
    ),
    "no length": (lambda: lying_flac(0), "its header does not tell its length"),
    "samples": (lambda: lying_flac(HIGH * 1_799), "it has 79,335,900 samples; 70,000,000 are"),
    "cut MP3": (lambda: encoded(sines(1), format="MP3")[:-1_000], "it is truncated: "),
    "cut FLAC": (lambda: encoded(sines(1), format="FLAC")[:-400], "truncated|not audio that can"),
    "claims more": (lambda: lying_flac(HIGH * 60), "truncated|not audio that can"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_formats_are_refused_by_their_header_or_when_they_end(name, monkeypatch):
    make, why = REFUSED[name]
    monkeypatch.setattr(audio_codecs, "MAX_FRAMES", 70_000_000)
    with pytest.raises(BadAudio, match=why):
        decode_audio(make(), RATE)


def test_what_a_header_claims_takes_no_memory():
    content = lying_flac(HIGH * 1_700)
    tracemalloc.start()
    with pytest.raises(BadAudio):
        decode_audio(content, RATE)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_without_the_packages_wav_files_at_the_rate_alone_are_decoded(monkeypatch):
    flac = encoded(sines(1), format="FLAC")
    monkeypatch.setattr(audio_module, "has_extra", lambda _: False)
    assert decode_audio(wav(SAMPLES), RATE).tobytes() == FLOATS.tobytes()
    for content, why in (
        (flac, "it is FLAC"),
        (wav(SAMPLES, HIGH), "its sampling rate is 44100 Hz"),
    ):
        with pytest.raises(MissingPackages, match=rf"{why}.* pip install 'penstock\[audio\]'"):
            decode_audio(content, RATE)


def test_the_length_is_known_before_anything_is_decoded():
    slow = wav(np.zeros(MAX_SECONDS + 1, np.int16), rate=1)
    with pytest.raises(BadAudio, match="1,801 s long; 1,800 are allowed"):
        read_wav_header(slow)


@pytest.mark.parametrize("model_type", ["qwen2_audio", "voxtral"])
def test_features_and_text_are_bitwise_those_of_the_processor(tmp_path, model_type):
    folder = write_audio_processor(tmp_path, model_type)
    mine = load_processor(folder)
    theirs: Any = AutoProcessor.from_pretrained(folder)
    for seed, length in ((0, 4_000), (1, 15_999), (2, 16_000)):
        samples = decode_audio(wav(tone(seed, length)), RATE)
        found = mine.process(samples)
        if model_type == "voxtral":
            options = {**theirs.audio_kwargs}
            features = theirs._retrieve_input_features([samples], **options)
            wanted = {"input_features": features.numpy()}
            assert mine.replacement(found) == theirs.audio_token * 375
        else:
            options = {"sampling_rate": RATE, "return_tensors": "np"}
            wanted = dict(theirs(text=[theirs.audio_token], audio=[samples], **options))
            ids = wanted.pop("input_ids")[0].tolist()
            wanted.pop("attention_mask")
            assert ids == theirs.tokenizer(mine.replacement(found))["input_ids"]
            assert len(ids) > 1
        for name, values in wanted.items():
            tensor = found[name].numpy()
            assert tensor.shape == values.shape
            assert (tensor.dtype, tensor.tobytes()) == (values.dtype, values.tobytes())
        assert found["input_features"].shape[1] == MELS


def test_audio_that_the_processor_would_cut_is_refused(tmp_path):
    mine = load_processor(write_audio_processor(tmp_path))
    stored = mine.store(b"a" * 32, wav(tone(0, 16_001)))
    assert stored.error == "it is 1.0 s long, and the model's processor takes 1 s; split it"
    assert mine.store(b"a" * 32, wav(tone(0))).size == (4_000, RATE)
