"""The audio processor of a model: audio to log-mel features, and to the text that stands for it.

Feature extractors of transformers, behind the model's processor. All audio is processed alone, so
that the result depends on nothing else.
"""

from dataclasses import dataclass
from typing import Any

from penstock.core.errors import CapabilityError, ConfigError
from penstock.media.audio import decode_audio, require_packages
from penstock.media.audio_codecs import BadAudio, Samples
from penstock.media.kinds import AUDIO, first_line
from penstock.media.model_processor import (
    ModelProcessor,
    ProcessorFiles,
    Tensors,
    build_processor,
    processor_class,
    to_arrays,
)
from penstock.rows.pixel_table import stored

FORMAT = 2  # Increase it if the same settings must give other tensors

EXTRACTORS = ("feature_extractor", "audio_processor")
"""Names of the feature extractor in a processor."""

# A processor that extracts features, and leaves texts to another library (mistral-common).
VOXTRAL = "VoxtralProcessor"

# Voxtral: frames of features of a token (two convolutions and a projector of 4 positions).
FRAMES_PER_TOKEN = 8


@dataclass(frozen=True)
class AudioProcessor(ModelProcessor):
    """A feature extractor and the parts of its processor that concern text."""

    kind = AUDIO

    @property
    def extractor(self) -> Any:
        return next(
            extractor for name in EXTRACTORS if (extractor := getattr(self.processor, name, None))
        )

    @property
    def rate(self) -> int:
        return int(self.extractor.sampling_rate)

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "class": [self.name, type(self.extractor).__name__],
            "settings": self.extractor.to_dict(),
            "options": dict(self.options),
        }

    def require_packages(self, content: bytes) -> None:
        require_packages(content, self.rate)

    def _process_file(self, digest: bytes, content: bytes) -> tuple[Tensors, tuple[int, int]]:
        del digest
        samples = decode_audio(content, self.rate)
        return self.process(samples), (len(samples), self.rate)

    def process(self, samples: Samples) -> Tensors:
        """The tensors of audio. Raises BadAudio if the processor refuses it, or would cut it."""
        longest = getattr(self.extractor, "n_samples", None)
        if longest and self.options.get("truncation", True) and len(samples) > longest:
            raise BadAudio(
                f"it is {len(samples) / self.rate:.1f} s long, and the model's processor takes "
                f"{longest / self.rate:.0f} s; split it"
            )
        try:
            if self.name == VOXTRAL:
                features = self.processor._retrieve_input_features([samples], **self.options)
                outputs: Any = {"input_features": features}
            else:
                outputs, _ = self.processor._process_audio([samples], **self.options)
        except (ValueError, RuntimeError) as error:
            raise BadAudio(f"the audio processor refuses it: {first_line(error)}") from error
        return {name: stored(array) for name, array in to_arrays(outputs).items()}

    def replacement(self, tensors: Tensors) -> str:
        if self.name == VOXTRAL:
            chunks, _, frames = tensors["input_features"].shape
            return self.token * (chunks * frames // FRAMES_PER_TOKEN)
        arrays = {name: tensor.stand_in() for name, tensor in tensors.items()}
        return str(self.processor.replace_audio_token(arrays, audio_idx=0, **self.options))


def load_audio_processor(path: str, revision: str | None, tokenizer: Any) -> AudioProcessor | None:
    """The audio processor in a folder or hub repository; None if it has none.

    `tokenizer` is the one of the same folder. Raises CapabilityError for processors that are not
    supported, ConfigError if the files cannot be used.
    """
    files = ProcessorFiles(path, revision)
    cls = processor_class(files) if files.has_processor else None
    names = [name for name in EXTRACTORS if cls and name in cls.get_attributes()]
    if cls is None or not names:
        return None
    from transformers import AutoFeatureExtractor  # noqa: PLC0415 - takes a second

    try:
        extractor = AutoFeatureExtractor.from_pretrained(
            files.path, revision=files.revision, trust_remote_code=False
        )
        processor = build_processor(cls, {names[0]: extractor}, tokenizer, files)
    except ImportError as error:
        raise CapabilityError(
            f"The audio processor of {path} needs further packages: {first_line(error)}"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"The audio processor of {path} cannot be loaded: {first_line(error)}"
        ) from error
    # Only this private method gives the options of a call without arguments: the class's defaults,
    # under those that the tokenizer was saved with.
    merged = processor._merge_kwargs(tokenizer_init_kwargs=tokenizer.init_kwargs)
    options = {**merged["audio_kwargs"], "sampling_rate": extractor.sampling_rate}
    # Voxtral's code joins chunks by `torch.cat`, which takes no arrays.
    options["return_tensors"] = "pt" if cls.__name__ == VOXTRAL else "np"
    audio = AudioProcessor(processor, options)
    _require_supported(audio)
    return audio


def _require_supported(audio: AudioProcessor) -> None:
    from transformers.processing_utils import ProcessorMixin  # noqa: PLC0415

    cls = type(audio.processor)
    is_silent = cls.replace_audio_token is ProcessorMixin.replace_audio_token
    if is_silent and audio.name != VOXTRAL:
        raise CapabilityError(
            f"Audio cannot be processed apart from its text with {audio.name}, which is not "
            "supported."
        )
    audio.require_token()
