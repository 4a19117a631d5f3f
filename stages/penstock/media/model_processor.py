"""What the processors of all kinds of media share: the files of a model's processor, and the texts
that stand for media."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from penstock.core.cache.record import digest_json
from penstock.core.cache.stage import short
from penstock.core.errors import CapabilityError, ConfigError
from penstock.media.bounds import UNBOUNDED, MediaBounds
from penstock.media.kinds import BadMedia, MediaKind
from penstock.media.reference import among_several
from penstock.rows.image_files import StoredImage
from penstock.rows.pixel_table import StoredTensor

Arrays = dict[str, npt.NDArray[Any]]
Tensors = dict[str, StoredTensor]  # Outputs of a processor, by name

PROCESSOR, IMAGE_PROCESSOR = "processor_config.json", "preprocessor_config.json"
# Files that may name the processor's class, in the order in which transformers asks them.
CLASS_FILES = (PROCESSOR, IMAGE_PROCESSOR, "tokenizer_config.json", "config.json")


@dataclass(frozen=True)
class ModelProcessor(ABC):
    """The part of a model's processor for one kind of media, and those that concern text."""

    processor: Any  # A `ProcessorMixin` of transformers
    options: Mapping[str, Any]  # Keyword arguments of the part for this kind
    bounds: MediaBounds = field(default=UNBOUNDED, kw_only=True)

    kind: ClassVar[MediaKind]

    @property
    def name(self) -> str:
        return str(self.processor.name)

    @property
    def token(self) -> str:
        """The text that the chat template writes for an image, or for audio."""
        return getattr(self.processor, f"{self.kind.name}_token")

    @property
    def token_id(self) -> int:
        """The token that takes a feature."""
        return getattr(self.processor, f"{self.kind.name}_token_ids")[0]

    @property
    def has_two_forms(self) -> bool:
        """Whether a medium of a sample with several has other tensors than one alone."""
        return False

    def stored_digest(self, digest: bytes, *, several: bool) -> bytes:
        """The digest under which the tensors of a medium are stored, given that of its bytes and
        whether it is in a sample with several."""
        form = among_several(digest) if several and self.has_two_forms else digest
        return self.bounds.stored_digest(self.kind.name, form)

    @property
    def chat_template(self) -> str | None:
        template = self.processor.chat_template
        return template.get("default") if isinstance(template, dict) else template

    @cached_property
    def reserved(self) -> tuple[str, ...]:
        """Texts that stand for media, and may not be in the text of a record."""
        feature = self.processor.tokenizer.convert_ids_to_tokens(self.token_id)
        return tuple(dict.fromkeys((self.token, str(feature))))

    @cached_property
    def unused(self) -> frozenset[str]:
        """Outputs that the model does not take."""
        return frozenset(self.processor.unused_input_names)

    @cached_property
    def key(self) -> str:
        return short(digest_json(json.loads(json.dumps(self.settings, default=str))))

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Everything that determines the tensors."""

    def require_packages(self, content: bytes) -> None:
        """Raise MissingPackages without the packages that this file needs beside others."""
        del content  # none

    def store(self, digest: bytes, content: bytes) -> StoredImage:
        """The tensors of a file, or why it has none. `digest`: the one under which they are stored
        (`stored_digest`)."""
        try:
            return StoredImage(digest, *self._process_file(digest, content))
        except BadMedia as error:
            return StoredImage(digest, {}, error=str(error))

    @abstractmethod
    def _process_file(self, digest: bytes, content: bytes) -> tuple[Tensors, tuple[int, int]]:
        """(tensors, size): width and height, or samples and their rate. Raises BadMedia."""

    def require_token(self) -> None:
        """Raise CapabilityError without a token that stands for media of this kind."""
        kind = self.kind.name
        if getattr(self.processor, f"{kind}_token", None) is None or self.token_id is None:
            raise CapabilityError(f"{self.name} has no {kind} token, which is not supported.")

    @abstractmethod
    def replacement(self, tensors: Tensors) -> str:
        """The text that takes the place of the token of media with these tensors."""


@dataclass(frozen=True)
class ProcessorFiles:
    """The files of a folder or hub repository."""

    location: str
    commit: str | None

    @cached_property
    def path(self) -> str:
        folder = Path(self.location).expanduser()
        return str(folder) if folder.exists() else self.location

    @property
    def revision(self) -> str:
        return self.commit or "main"

    @property
    def has_processor(self) -> bool:
        if self.location.startswith("builtin:"):
            return False
        return any(self._find(name) is not None for name in (PROCESSOR, IMAGE_PROCESSOR))

    def read(self, name: str) -> dict[str, Any]:
        """The JSON object in a file; empty without it."""
        file = self._find(name)
        try:
            value = json.loads(Path(file).read_bytes()) if file else {}
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{name} of {self.location} is not JSON: {error}") from error
        return value if isinstance(value, dict) else {}

    def _find(self, name: str) -> str | None:
        from transformers.utils import cached_file  # noqa: PLC0415

        quiet = {
            f"_raise_exceptions_for_{error}": False
            for error in ("gated_repo", "missing_entries", "connection_errors")
        }
        return cached_file(self.path, name, revision=self.revision, **quiet)


def processor_class(files: ProcessorFiles) -> Any:
    """The processor's class; None if the files name none."""
    from transformers.models.auto.processing_auto import (  # noqa: PLC0415
        PROCESSOR_MAPPING_NAMES,
        processor_class_from_name,
    )

    names = [value.get("processor_class") for name in CLASS_FILES if (value := files.read(name))]
    classes = dict(PROCESSOR_MAPPING_NAMES)
    by_type = classes.get(files.read("config.json").get("model_type", ""))
    name = next((name for name in names if name), by_type)
    name = name[0] if isinstance(name, tuple) else name
    if name == "PixtralProcessor":
        from penstock.media.pixtral import PixtralProcessor  # noqa: PLC0415 - takes a second

        return PixtralProcessor
    return processor_class_from_name(name) if name else None


def build_processor(
    cls: Any, parts: Mapping[str, Any], tokenizer: Any, files: ProcessorFiles
) -> Any:
    """The processor with these parts alone: others may need further packages."""

    def accept(self: Any, name: str, part: Any) -> Any:
        return None if part is None else cls.check_argument_for_proper_class(self, name, part)

    own = type(
        cls.__name__, (cls,), {"check_argument_for_proper_class": accept, "name": cls.__name__}
    )
    parts = {**parts, "tokenizer": tokenizer}
    written, _ = cls.get_processor_dict(files.path, revision=files.revision)
    built: Any = own.from_args_and_dict([parts.get(name) for name in cls.get_attributes()], written)
    return built[0] if isinstance(built, tuple) else built


def to_arrays(outputs: Any) -> Arrays:
    """Outputs of a processor as arrays. Raises BadMedia for another kind."""
    arrays: Arrays = {}
    for name, value in dict(outputs).items():
        array = np.asarray(value)
        if array.dtype == object:
            raise BadMedia(f"{name} is no array")
        arrays[name] = np.ascontiguousarray(array)
    return arrays
