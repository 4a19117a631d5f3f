"""Images, audio and videos in rendered texts: each image token becomes the text of its image."""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from penstock.media.kinds import KINDS
from penstock.media.model_processor import ModelProcessor
from penstock.media.reference import Folder, ImageRef, image_digest
from penstock.prepare.bad_records import BadRecord
from penstock.prepare.encode.document import Document, Span
from penstock.prepare.encode.ragged import Ids, TokenSequences
from penstock.prepare.formats.conversation import Conversation, Message
from penstock.prepare.formats.images import text_part
from penstock.rows.image_files import ImageFiles
from penstock.rows.schema import IGNORED

Located = tuple[Folder | None, bytes]
"""The folder to which the path of an image is relative, and the digest of the path or content."""

MEDIA_LIKE = re.compile("image|img|audio|video", re.IGNORECASE)
"""Names of tokens that may stand for media, such as `<image>`, `<|image_pad|>` and `[IMG]`."""

# What transformers shows a template in place of a value that is no JSON.
SHOWN = "<bytes>"

CUT = "cutting it to max_seq_len would cut an image"


def locate(ref: ImageRef, folder: Folder | None) -> Located:
    """What identifies an image of a record."""
    if ref.frames:
        frames = [locate(frame, folder) for frame in ref.frames]
        return folder, image_digest(repr((frames, ref.fps)).encode())
    if ref.content:
        return None, image_digest(ref.content)
    return folder, image_digest(ref.location.encode())


class ImagesFound(Exception):  # noqa: N818 - caught within this package
    """A record has media, which must be read before the slice is encoded."""


def no_processor(kind: str) -> BadRecord:
    """Why a record with media of this kind cannot be used with a model that takes none."""
    return BadRecord(
        "bad_value",
        f"it has {KINDS[kind].plural}, and the model has no {kind} processor "
        "(preprocessor_config.json beside its tokenizer)",
    )


@dataclass(frozen=True)
class LoadedKind:
    """The media of one kind in a slice, decoded and processed."""

    processor: ModelProcessor
    files: ImageFiles
    digests: Mapping[Located, bytes | BadRecord]
    """Digest of each, or why it cannot be used."""
    lacking: Collection[str] = ()
    """Extras of this package that some need."""

    def resolve(self, ref: ImageRef, folder: Folder | None, *, several: bool) -> bytes:
        """The digest under which its tensors are stored. Raises BadRecord if it cannot be used."""
        digest = self.digests[locate(ref, folder)]
        if isinstance(digest, BadRecord):
            raise digest
        digest = self.processor.stored_digest(digest, several=several)
        stored = self.files.get(digest)
        if stored is None or stored.error is not None:
            raise BadRecord("bad_value", f"{ref}: {stored.error if stored else 'it is missing'}")
        return digest

    def replacement(self, digest: bytes) -> str:
        """The text that takes the place of its token."""
        stored = self.files.get(digest)
        assert stored is not None
        return self.processor.replacement(dict(stored.tensors))


class ImageTokenFound(ImagesFound):
    """A record without media has a token that may stand for some: the model's processor says."""


def media_like_tokens(tokenizer: PreTrainedTokenizerBase) -> Ids:
    """Ids of the added tokens that may stand for media, by their names; sorted."""
    named = {token_id: str(token) for token_id, token in tokenizer.added_tokens_decoder.items()}
    return np.array(
        sorted(token_id for token_id, name in named.items() if MEDIA_LIKE.search(name)), np.int32
    )


@dataclass(frozen=True)
class SliceImages:
    """The images, audio and videos of a slice, by kind."""

    kinds: Mapping[str, LoadedKind]
    unused_processors: Sequence[ModelProcessor] = ()
    """The model's processors of the kinds that the slice has none of."""

    @property
    def processors(self) -> list[ModelProcessor]:
        """The model's processors of all kinds."""
        return [*(kind.processor for kind in self.kinds.values()), *self.unused_processors]

    @property
    def token_ids(self) -> list[int]:
        """The tokens that take features."""
        return [processor.token_id for processor in self.processors]

    @property
    def chat_template(self) -> str | None:
        """The chat template of the processor; None without one."""
        return next(kind.processor.chat_template for kind in self.kinds.values())

    @cached_property
    def _tokens(self) -> re.Pattern[str]:
        tokens = {re.escape(kind.processor.token) for kind in self.kinds.values()}
        return re.compile("|".join(sorted(tokens)))

    def resolve(self, conversation: Conversation, folder: Folder | None) -> Conversation:
        """The conversation with digests as its media. Raises BadRecord for media that cannot be
        used, and for a text that has a token of media."""
        several = conversation.several
        messages = [
            self._resolve_message(message, folder, several) for message in conversation.messages
        ]
        return replace(conversation, messages=messages)

    def resolve_prompt(self, conversation: Conversation, folder: Folder | None) -> Conversation:
        """`resolve` for a completion, which has no media: all are in the prompt, which other
        completions have too. Raises BadRecord as `resolve`, and for media elsewhere."""
        answers = [*conversation.trained, True].index(True)
        prompt = replace(conversation, messages=conversation.messages[:answers])
        if behind := conversation.media[len(prompt.media) :]:
            article = KINDS[behind[0][0]].article
            raise BadRecord("bad_value", f"it has {article} behind the prompt, in what is compared")
        return self.resolve(conversation, folder)

    def expand(self, document: Document, media: Sequence[tuple[str, bytes]]) -> Document:
        """Replace the token of each image or audio. Raises BadRecord unless there is one for each,
        in order. `media` are (kind, digest)."""
        placeholders = [*self._tokens.finditer(document.text)]
        self._require_places(
            [placeholder[0] for placeholder in placeholders], [kind for kind, _ in media]
        )
        texts = [self.kinds[kind].replacement(digest) for kind, digest in media]
        ends = [placeholder.end() for placeholder in placeholders]
        lengths = (
            len(t) - len(placeholder[0]) for t, placeholder in zip(texts, placeholders, strict=True)
        )
        added = [0, *accumulate(lengths)]

        def moved(offset: int) -> int:
            # side="right": a span that ends with a token also ends with the text in its place.
            return offset + added[int(np.searchsorted(ends, offset, side="right"))]

        parts, start = list[str](), 0
        for text, placeholder in zip(texts, placeholders, strict=True):
            parts += document.text[start : placeholder.start()], text
            start = placeholder.end()
        spans = document.spans
        features = [self.kinds[kind].processor.reserved[-1] for kind, _ in media]
        return replace(
            document,
            text="".join([*parts, document.text[start:]]),
            spans=None
            if spans is None
            else tuple(Span(moved(a), moved(b), message) for a, b, message in spans),
            images=tuple(digest for _, digest in media),
            image_tokens=tuple(t.count(f) for t, f in zip(texts, features, strict=True)),
        )

    def _require_places(self, tokens: Sequence[str], kinds: Sequence[str]) -> None:
        expected = [self.kinds[kind].processor.token for kind in kinds]
        if tokens == expected:
            return
        counts, expected_counts = Counter(tokens), Counter(expected)
        for kind, media in self.kinds.items():
            token = media.processor.token
            if counts[token] != expected_counts[token]:
                raise BadRecord(
                    "template",
                    f"the chat template writes {counts[token]} {kind} tokens ({token}) for "
                    f"{expected_counts[token]} {KINDS[kind].plural}",
                )
        raise BadRecord("template", "the chat template writes its media in another order")

    def check(self, flat: TokenSequences, documents: Sequence[Document]) -> dict[int, BadRecord]:
        """Mask the tokens of media, and return the faults of documents with more or fewer of them
        than features."""
        is_media = np.isin(flat.ids, self.token_ids)
        flat.labels[is_media] = IGNORED
        before = np.concatenate([[0], np.cumsum(is_media)])
        counts = np.diff(before[flat.offsets]).tolist()
        return {
            index: self._fault(flat[index][0], sum(document.image_tokens))
            for index, (count, document) in enumerate(zip(counts, documents, strict=True))
            if count != sum(document.image_tokens)
        }

    def check_prompts(self, side: TokenSequences) -> dict[int, BadRecord]:
        """The faults of samples whose prompt ends with an image or the like: the last token of a
        prompt is stored with each completion (`rows.shared_prefix`)."""
        prompts = side.prompt_lengths()
        positions = np.flatnonzero(prompts)
        last = side.ids[(side.offsets[:-1] + prompts - 1)[positions]]
        article = " or ".join(KINDS[kind].article for kind in self.kinds)
        return {
            position: BadRecord(
                "template", f"its prompt ends with {article}, with no text behind it"
            )
            for position in positions[np.isin(last, self.token_ids)].tolist()
        }

    def check_ids(self, ids: Ids) -> None:
        """Raise BadRecord for a tokenized sample with a token of media, as it has none."""
        if np.isin(ids, self.token_ids).any():
            raise self._fault(ids, 0)

    def _fault(self, ids: Ids, features: int) -> BadRecord:
        if not features:
            stands = (
                f"{processor.reserved[-1]}, which stands for {processor.kind.article}"
                for processor in self.processors
                if processor.token_id in ids
            )
            return BadRecord("bad_value", f"its text has {' and '.join(stands)}")
        kind_names, tokens = " and ".join(self.kinds), int(np.isin(ids, self.token_ids).sum())
        return BadRecord("template", f"it has {tokens} {kind_names} tokens for {features} features")

    def _resolve_message(
        self, message: Message, folder: Folder | None, several: Collection[str]
    ) -> Message:
        content = message["content"]
        if isinstance(content, list):
            parts = [self._resolve_part(part, folder, several) for part in content]
            return {**message, "content": parts}
        self._check_text(content or "")
        return message

    def _resolve_part(
        self, part: Message, folder: Folder | None, several: Collection[str]
    ) -> Message:
        kind = part["type"]
        if kind not in KINDS:
            self._check_text(part["text"])
            return part
        if kind not in self.kinds:
            raise no_processor(kind)
        digest = self.kinds[kind].resolve(part[kind], folder, several=kind in several)
        return {**part, kind: digest}

    def _check_text(self, text: str) -> None:
        for processor in self.processors:
            for token in processor.reserved:
                if token in text:
                    reason = f"its text has {token}, which stands for {processor.kind.article}"
                    raise BadRecord("bad_value", reason)


def with_parts(message: Message) -> dict[str, Any]:
    """The message with its text as a part, for templates that read nothing else."""
    content = message.get("content")
    return {**message, "content": [text_part(content)]} if isinstance(content, str) else message


def without_digests(message: Message) -> dict[str, Any]:
    """The message with what transformers shows a template in place of media."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [{**part, part["type"]: SHOWN} if part["type"] in KINDS else part for part in content]
    return {**message, "content": parts}
