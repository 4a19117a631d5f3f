"""WAV files, and audio processors with tiny features, made in code."""

import io
import json
import struct
import wave
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.media.audio_processor import AudioProcessor, load_audio_processor
from penstock.rows.tokenizer import load_tokenizer
from tests.media.tiny_processors import CHATML, write_tokenizer

RATE = 16_000
MELS = 8
AUDIO_CHATML = CHATML.replace("c.type == 'image' or 'image' in c", "c.type == 'audio'")

Samples = npt.NDArray[np.int16]


def tone(seed: int, samples: int = 4_000) -> Samples:
    """Noise of one channel, int16."""
    generator = np.random.default_rng(seed)
    return generator.integers(-20_000, 20_000, samples).astype(np.int16)


def wav(samples: npt.NDArray[np.integer], rate: int = RATE, channels: int = 1) -> bytes:
    """A PCM file of these samples, by the standard library."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(samples.itemsize)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return out.getvalue()


def float_wav(samples: npt.NDArray[np.floating], *, extensible: bool = False) -> bytes:
    """A file of floats, which the standard library does not write; with a chunk of odd length
    before its samples."""
    size = samples.itemsize
    tag = 0xFFFE if extensible else 3
    form = struct.pack("<HHIIHH", tag, 1, RATE, RATE * size, size, 8 * size)
    if extensible:
        form += struct.pack("<HHIH", 22, 8 * size, 4, 3) + b"\0" * 14
    chunks = [(b"fmt ", form), (b"LIST", b"odd"), (b"data", samples.tobytes())]
    body = b"".join(
        name + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)
        for name, content in chunks
    )
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body


def write_audio_processor(folder: Path, model_type: str = "qwen2_audio") -> Path:
    """The tokenizer, chat template and processor files of a tiny model."""
    folder.mkdir(parents=True, exist_ok=True)
    audio = "<|audio_bos|><|AUDIO|><|audio_eos|>"
    special = ["<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>"]
    name, chunk = "Qwen2AudioProcessor", 1
    if model_type == "voxtral":
        audio, special, name, chunk = "[AUDIO]", [], "VoxtralProcessor", 30
    placed = (24, audio) if model_type == "voxtral" else None
    write_tokenizer(folder, special, {}, bos=None, placed=placed)
    own = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": MELS,
        "chunk_length": chunk,
        "return_attention_mask": model_type == "qwen2_audio",
        "sampling_rate": RATE,
        "hop_length": 160,
        "n_fft": 400,
        "processor_class": name,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(own))
    (folder / "chat_template.jinja").write_text(AUDIO_CHATML.replace("IMAGE", audio))
    return folder


def load_processor(folder: Path) -> AudioProcessor:
    """The audio processor in a folder that has one."""
    found = load_audio_processor(str(folder), None, load_tokenizer(str(folder)))
    assert found is not None
    return found
