"""Decode the chunks of a model input: tokens, and images, each of which is replaced by the tokens
that its model's processor writes for it."""

import binascii
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.media.kinds import BadMedia
from penstock.media.reference import among_several
from penstock.server.api.errors import ApiError
from penstock.server.api.wire import tinker_pb2 as pb
from penstock.server.api.wire.tensors import (
    MAX_NUMBERS,
    from_list,
    per_token,
    to_integers,
    tokens_from_bytes,
)
from penstock.server.protocol.images import Image

MAX_IMAGES = 512  # Maximum number of distinct images of a request
# Of the tensors of all distinct images of a request: a small file may have many pixels.
MAX_IMAGE_BYTES = 128 << 20
MAX_BASE64 = 180 << 20  # Maximum characters of an image in JSON: `media.kinds.MAX_BYTES` in base64
TEXT, IMAGE = "encoded_text", "image"
IMAGE_FIELDS = {"type", "data", "format", "expected_tokens"}
ONLY_TEXT = "text alone is trained on here"  # Why a model that takes no images refuses a chunk

WHY_NOT = {
    "image_asset_pointer": "send the image itself, as a chunk of type 'image'",
    "dmel": "audio is not read here",
}
"""Why chunks of other kinds are refused."""

EncodedImage = tuple[bytes, str, int | None]
"""The file of an image chunk, its format, and the number of tokens that the client expects."""

C = TypeVar("C")
Tokens = npt.NDArray[np.int64]


class ExpandedImage(NamedTuple):
    """A processed image, and the tokens that stand for it, int64."""

    image: Image
    tokens: Tokens


class ImageExpander(Protocol):
    """The image processor of the model."""

    @property
    def has_two_forms(self) -> bool:
        """Whether an image of a sample with several has other tensors than one alone."""
        ...

    def expand(
        self, content: bytes, format: str, digest: bytes, *, several: bool = False
    ) -> ExpandedImage:
        """Process a `png` or `jpeg` of a sample with `several` images or one. Raises BadMedia."""
        ...


class ModelInput(NamedTuple):
    """A decoded model input: its tokens, int64 [T], and its images, by their index in the
    request."""

    tokens: Tokens
    images: tuple[int, ...]


@dataclass
class ChunkDecoder:
    """Decodes the model inputs of one request, and keeps its images."""

    expander: ImageExpander | None  # None: the model takes no images
    images: list[Image] = field(default_factory=list[Image])  # The distinct images so far
    _expanded: dict[bytes, tuple[int, Tokens]] = field(
        default_factory=dict[bytes, tuple[int, Tokens]]
    )
    """Index and tokens of each, by its digest."""
    _num_bytes: int = 0
    _num_tokens: int = 0

    def from_proto(self, chunks: Sequence[pb.Chunk], loc: str) -> ModelInput:
        """The model input of an SDK sample. Raises ApiError naming the chunk."""
        kinds = [str(chunk.WhichOneof("chunk")) for chunk in chunks]
        return self._decode(chunks, kinds, loc, _text_from_proto, _image_from_proto)

    def from_json(self, chunks: Any, loc: str) -> ModelInput:
        """The same of chunks in JSON."""
        if not isinstance(chunks, list) or not all(isinstance(chunk, dict) for chunk in chunks):
            raise ApiError(f"the chunks of {loc} are no list of chunks")
        kinds = [str(chunk.get("type", TEXT)) for chunk in chunks]
        return self._decode(chunks, kinds, loc, _text_from_json, _image_from_json)

    def _decode(
        self,
        chunks: Sequence[C],
        kinds: Sequence[str],
        loc: str,
        read_text: Callable[[C, str, str], Tokens],
        read_image: Callable[[C, str], EncodedImage],
    ) -> ModelInput:
        """`read_text` gets the names of the model input and of the chunk, for its errors."""
        several = kinds.count(IMAGE) > 1
        tokens, images = [np.zeros(0, np.int64)], list[int]()
        for number, (chunk, kind) in enumerate(zip(chunks, kinds, strict=True)):
            chunk_loc = f"chunk {number} of {loc}"
            if kind == TEXT:
                tokens.append(read_text(chunk, loc, chunk_loc))
                continue
            if self.expander is None or kind != IMAGE:
                why = WHY_NOT.get(kind, "text and images are read here")
                why = ONLY_TEXT if self.expander is None else why
                raise ApiError(f"{loc} has a chunk of {kind[:50]!r}: {why}")
            content, format, expected = read_image(chunk, chunk_loc)
            index, image_tokens = self.expand(content, format, chunk_loc, several=several)
            if expected is not None and expected != len(image_tokens):
                raise ApiError(
                    f"{chunk_loc} is an image of {len(image_tokens)} tokens, and its"
                    f" expected_tokens is {expected}: compute it with the image processor of the"
                    " model, or leave it out"
                )
            tokens.append(image_tokens)
            images.append(index)
        return ModelInput(np.concatenate(tokens), tuple(images))

    def expand(self, content: bytes, format: str, loc: str, *, several: bool) -> tuple[int, Tokens]:
        """Index and tokens of an image, which is processed once, or once alone and once among
        several where these differ. Raises ApiError."""
        assert self.expander is not None
        digest = sha256(content + format.encode()).digest()
        if several and self.expander.has_two_forms:
            digest = among_several(digest)
        if digest not in self._expanded:
            if len(self.images) == MAX_IMAGES:
                raise ApiError(
                    f"there are over {MAX_IMAGES} images; send fewer at once", status=413
                )
            try:
                image, tokens = self.expander.expand(content, format, digest, several=several)
            except BadMedia as error:
                raise ApiError(f"{loc} cannot be used: {error}") from None
            self._num_bytes += image.num_bytes
            _require_bytes(self._num_bytes)
            self._expanded[digest] = len(self.images), tokens
            self.images.append(image)
        index, tokens = self._expanded[digest]
        self._num_tokens += len(tokens)
        if self._num_tokens > MAX_NUMBERS:
            raise ApiError(
                f"the images have over {MAX_NUMBERS} tokens; send fewer at once", status=413
            )
        return index, tokens

    def each_image(self, indices: Sequence[int]) -> tuple[Image, ...]:
        """The images of a prompt, with repetitions. Raises ApiError if these are too many."""
        images = tuple(self.images[index] for index in indices)
        _require_bytes(sum(image.num_bytes for image in images))
        return images


def _require_bytes(count: int) -> None:
    if count > MAX_IMAGE_BYTES:
        raise ApiError(
            f"the processed images have over {MAX_IMAGE_BYTES} bytes; send fewer at once",
            status=413,
        )


def flatten(numbers: Tokens, loc: str) -> Tokens:
    """[T], also of [1, T]."""
    return per_token(numbers, numbers.size, loc) if numbers.size else numbers.reshape(0)


def _text_from_proto(chunk: pb.Chunk, loc: str, _chunk_loc: str) -> Tokens:
    return tokens_from_bytes(chunk.encoded_text.tokens, loc)


def _image_from_proto(chunk: pb.Chunk, chunk_loc: str) -> EncodedImage:
    image = chunk.image
    if image.HasField("override_dimensions"):
        raise ApiError(f"{chunk_loc} has override_dimensions, which is not read")
    expected = image.expected_tokens if image.HasField("expected_tokens") else None
    return image.data, image.format, expected


def _text_from_json(chunk: Mapping[str, Any], loc: str, chunk_loc: str) -> Tokens:
    if not isinstance(chunk.get("tokens"), list):
        raise ApiError(f"{chunk_loc} has no list of tokens")
    return flatten(to_integers(from_list(chunk["tokens"], loc), loc), loc)


def _image_from_json(chunk: Mapping[str, Any], loc: str) -> EncodedImage:
    if strange := sorted(map(str, chunk.keys() - IMAGE_FIELDS)):
        raise ApiError(f"{loc} has {strange[0][:100]}, which an image does not have")
    data, format, expected = (chunk.get(name) for name in ("data", "format", "expected_tokens"))
    if not isinstance(data, str) or len(data) > MAX_BASE64:
        raise ApiError(f"{loc} is an image, and its data is no text of base64 of a file")
    if not isinstance(format, str):
        raise ApiError(f"{loc} is an image, and has no format: png or jpeg")
    if isinstance(expected, bool) or not isinstance(expected, int | None):
        raise ApiError(f"the expected_tokens of {loc} is no whole number")
    try:
        # Without `validate` it skips characters that are not of the alphabet.
        return b64decode(data, validate=True), format, expected
    except (binascii.Error, ValueError):
        raise ApiError(f"{loc} is an image, and its data is no base64") from None
