"""What is decoded of audio, and features as the model's processor gives them."""

from typing import Any

import numpy as np
import pytest
from transformers import AutoProcessor

from penstock.media.audio import MAX_SECONDS, BadAudio, decode_wav, read_wav_header
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
    found = decode_wav(content, RATE)
    assert found.dtype == np.float32
    assert found.tobytes() == FLOATS.tobytes()


def test_eight_bits_are_unsigned_and_channels_are_averaged():
    assert decode_wav(wav(np.array([0, 128, 255], np.uint8)), RATE).tolist() == [-1, 0, 127 / 128]
    both = np.array([16384, 0, -16384, -16384], np.int16)
    assert decode_wav(wav(both, channels=2), RATE).tolist() == [0.25, -0.5]


BAD = {
    "empty": (b"", "it is empty"),
    "flac": (b"fLaC\0\0", "FLAC, which is not decoded"),
    "mp3": (b"ID3\x04\0\0", "MP3, which is not decoded"),
    "text": (b"hello", r"not audio that can be decoded \(known is WAV\)"),
    "truncated": (wav(SAMPLES)[:-100], "truncated: 100 bytes are missing"),
    "header": (wav(SAMPLES)[:20], "damaged WAV file"),
    "silent": (wav(SAMPLES[:0]), "no samples"),
    "rate": (wav(SAMPLES, 44_100), "44100 Hz, and the model's processor takes 16000 Hz"),
    "not finite": (float_wav(np.array([0.0, np.nan], np.float32)), "not finite"),
    "encoding": (wav(SAMPLES)[:20] + b"\x11" + wav(SAMPLES)[21:], "encoding 17 with 16 bits"),
}


@pytest.mark.parametrize(("content", "why"), BAD.values(), ids=BAD.keys())
def test_what_cannot_be_decoded_is_refused_with_its_reason(content, why):
    with pytest.raises(BadAudio, match=why):
        decode_wav(content, RATE)


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
        samples = decode_wav(wav(tone(seed, length)), RATE)
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
