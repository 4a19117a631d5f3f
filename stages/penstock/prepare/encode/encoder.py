"""Encode records of one data set: parse, render, tokenize, mask and truncate.

Batches are processed as a whole; rare cases (samples that are too long) are processed one by one
and replaced in the batch.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from penstock.core.errors import StageError
from penstock.media.kinds import KINDS
from penstock.media.reference import Folder, ImageRef
from penstock.prepare.bad_records import BadRecord
from penstock.prepare.encode.backends import FIRST_BATCH_CHECKS, LATER_BATCH_CHECKS
from penstock.prepare.encode.document import Document
from penstock.prepare.encode.images import (
    ImagesFound,
    ImageTokenFound,
    SliceImages,
    media_like_tokens,
    no_processor,
)
from penstock.prepare.encode.loss_mask import get_loss_masker
from penstock.prepare.encode.ragged import Ids, LabeledTokens, TokenSequences
from penstock.prepare.encode.render_chat import Renderer
from penstock.prepare.encode.special_tokens import SpecialTokens
from penstock.prepare.encode.truncate import Truncator, align_prompts
from penstock.prepare.formats.conversation import (
    Conversation,
    Parsed,
    PreferencePair,
    Text,
    TokenizedSample,
    conversations,
    map_conversations,
)
from penstock.prepare.formats.registry import parse_record, parse_weight
from penstock.prepare.readers.records import Value
from penstock.prepare.settings import DatasetSettings
from penstock.prepare.unread_columns import Unread, unread_keys
from penstock.rows.chat_template import ChatTemplate
from penstock.rows.schema import IGNORED
from penstock.rows.template_syntax import TemplateVariables, template_variables
from penstock.rows.template_tokens import locate_template

NO_TOKENS: Ids = np.empty(0, np.int32)

NEEDS_TEMPLATE = ("chat", "sharegpt", "sft_turns")
"""Formats that require a chat template."""


class NoTemplateError(StageError):
    """The data needs a chat template, and the tokenizer has none."""


@dataclass(slots=True)
class EncodedBatch:
    """The samples of a batch of records: `sides[s]` has one sequence per sample.

    Pairs have two sides (chosen, rejected), other samples one.
    """

    sides: list[TokenSequences]
    records: list[int]
    """Index in the batch of each sample's record, in order."""
    desirable: list[bool]
    """KTO labels; empty for other data."""
    score_gaps: list[float]
    """Chosen score minus rejected score of each pair; empty without scores."""
    faults: dict[int, BadRecord]
    """Reasons of records without a sample, by index in the batch."""
    counts: Counter[str]
    """Counts of records, by the names of `bad_records.Tally`."""
    unread_keys: Unread
    """Keys of messages that the chat template does not read."""
    images: list[tuple[bytes, ...]]
    """Digests of the images of each sample; empty for slices without images."""
    image_tokens: list[tuple[int, ...]]
    """Number of image tokens of each image of each sample."""


@dataclass(slots=True)
class _ParsedBatch:
    """The parsed records of a batch."""

    records: list[int] = field(default_factory=list[int])
    sides: list[list[Document]] = field(default_factory=list[list[Document]])
    """Per side, one document per record; empty for tokenized records."""
    tokenized: list[LabeledTokens] = field(default_factory=list[LabeledTokens])
    weights: list[float] = field(default_factory=list[float])
    """Loss weight of each record."""
    desirable: list[bool] = field(default_factory=list[bool])
    score_gaps: list[float | None] = field(default_factory=list[float | None])
    faults: dict[int, BadRecord] = field(default_factory=dict[int, BadRecord])
    counts: Counter[str] = field(default_factory=Counter[str])
    unread_keys: Unread = field(default_factory=Unread)


def _check_templates(
    tokenizer: PreTrainedTokenizerBase, chosen: ChatTemplate | None
) -> TemplateVariables:
    # A tokenizer may have several named templates; transformers takes `tool_use` where there are
    # tools.
    texts: Any = tokenizer.chat_template or {}
    template_name = (chosen and chosen.where) or locate_template(tokenizer)
    read = TemplateVariables(
        {
            name
            for text in ([texts] if isinstance(texts, str) else texts.values())
            for name in template_variables(text, template_name)
        }
    )
    read.warn_unread(chosen.variables if chosen else {}, "data.chat_template_kwargs")
    return read


class Encoder:
    """Encodes batches of records of one data set."""

    def __init__(
        self,
        settings: DatasetSettings,
        tokenizer: PreTrainedTokenizerBase,
        columns: Sequence[str] | None = None,
        images: SliceImages | Literal["unread", "refused"] = "unread",
        stop_token_ids: Collection[int] = (),
    ) -> None:
        """`columns`: the only columns that are used (`select_columns`). `images`: those of the
        records; `unread`: records with images, or a token that may stand for one, raise
        ImagesFound; `refused`: they are unusable. `stop_token_ids`: those of
        the generation config, besides the tokenizer's EOS token.

        Raises NoTemplateError, or StageError for an EOS token that the data needs and it lacks,
        ConfigError if its chat template is no Jinja, CapabilityError if the tokenizer is not
        supported."""
        self._loss_masker = get_loss_masker(tokenizer)  # cached, and the same for any template
        # Without the template of the settings, which the Encoder of `with_images` applies again.
        self._plain_tokenizer = tokenizer
        if settings.chat_template:
            tokenizer = settings.chat_template.apply(tokenizer)
        if settings.type in NEEDS_TEMPLATE and not tokenizer.chat_template:
            raise NoTemplateError(
                "The tokenizer has no chat template, which conversations need.\n"
                "  Name one in data.chat_template (chatml, for example), or set "
                "model.tokenizer_path to a tokenizer that has one."
            )
        self._variables = _check_templates(tokenizer, settings.chat_template)
        self._its = settings
        self._columns = columns
        self._vocabulary = len(tokenizer)
        self._tokenizer = tokenizer
        self._images = images if isinstance(images, SliceImages) else None
        self._refuses_images = images == "refused"
        self._stop_token_ids = stop_token_ids
        self._renderer = Renderer(tokenizer, settings, self._images, stop_token_ids)
        is_unread = not (self._images or self._refuses_images)
        self._media_like = media_like_tokens(tokenizer) if is_unread else NO_TOKENS
        self._special_tokens = SpecialTokens(
            settings, tokenizer, has_images=self._images is not None
        )
        tokens = self._images.token_ids if self._images else []
        self._truncator = Truncator(settings, self._encode, tokens)
        self._num_checks = FIRST_BATCH_CHECKS
        chosen = settings.chat_template and settings.chat_template.text
        template: Any = chosen or (self._images and self._images.chat_template)
        self._template = str(template or tokenizer.chat_template or "")

    @property
    def fallback_reason(self) -> str:
        """Why fastokens is not used; empty if it is."""
        return self._loss_masker.encoder.fallback_reason

    @property
    def num_per_turn(self) -> int:
        """Number of conversations so far that were rendered turn by turn."""
        return self._renderer.num_per_turn

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer."""
        return self._tokenizer

    @property
    def reads_images(self) -> bool:
        """Whether its samples have lists of images."""
        return self._images is not None

    def with_images(self, images: SliceImages | Literal["refused"]) -> "Encoder":
        """An encoder of the same data set that reads these images, or refuses all."""
        return Encoder(
            self._its, self._plain_tokenizer, self._columns, images, self._stop_token_ids
        )

    def iter_media(self, values: Sequence[Value]) -> Iterator[tuple[str, ImageRef | None, bool]]:
        """(kind, reference, whether its conversation has several) of the images and the like of the
        records that can be parsed; the reference is None for those without a place in their
        messages."""
        for value in values:
            try:
                parsed = parse_record(self._its, value, self._columns)
            except BadRecord:
                continue
            for conversation in conversations(parsed):
                several = conversation.several
                yield from ((kind, ref, kind in several) for kind, ref in conversation.media)
                yield from ((kind, None, False) for kind in conversation.unplaced)

    def __call__(self, values: Sequence[Value], folder: Folder | None = None) -> EncodedBatch:
        """Encode a batch. `folder`: the one to which paths of images are relative.

        Raises BackendMismatch if fastokens gives wrong token ids: earlier batches must be encoded
        again.
        """
        parsed = self._parse_batch(values, folder)
        if self._its.type == "tokenized":
            sides, faults = [TokenSequences.from_list(parsed.tokenized)], {}
        else:
            sides, faults = self._encode_sides(parsed.sides)
        faults |= self._truncate(sides, parsed, faults)
        usable = [index for index in range(len(parsed.records)) if index not in faults]
        parsed.faults |= {parsed.records[index]: fault for index, fault in faults.items()}
        selected = [side.select(usable) for side in sides]
        # After truncation, which finds the end of a prompt by its labels.
        if self._its.train_on_prompt and self._its.kind == "sft":
            selected = [_train_on_prompts(side) for side in selected]
        if self._its.kind == "sft":
            factors = np.array([parsed.weights[index] for index in usable], dtype=np.float32)
            selected = [side.weigh(factors) for side in selected]
        documents: list[Document] = []
        if self._images:
            # Tokenized records have no documents, and no images.
            sides = [side or [Document("")] * len(parsed.records) for side in parsed.sides]
            for side, rendered in zip(selected, sides, strict=True):
                documents = [rendered[index] for index in usable]
                # Again, as `_train_on_prompts` has labeled the tokens of media, too.
                faults = self._images.check(side, documents)
                assert not faults
        return EncodedBatch(
            selected,
            [parsed.records[index] for index in usable],
            [parsed.desirable[index] for index in usable if parsed.desirable],
            [
                gap
                for i in usable
                if parsed.score_gaps and (gap := parsed.score_gaps[i]) is not None
            ],
            parsed.faults,
            parsed.counts,
            parsed.unread_keys,
            [document.images for document in documents],
            [document.image_tokens for document in documents],
        )

    def _parse_batch(self, values: Sequence[Value], folder: Folder | None) -> _ParsedBatch:
        parsed = _ParsedBatch(sides=[[], []] if self._its.kind == "preference" else [[]])
        for index, value in enumerate(values):
            try:
                self._parse_record(index, value, parsed, folder)
            except BadRecord as fault:
                parsed.faults[index] = fault
            else:
                parsed.records.append(index)
        return parsed

    def _resolve_images(
        self, parsed: Parsed, parts: Sequence[Conversation], folder: Folder | None
    ) -> Parsed:
        """The record with its media; `parts` are its conversations."""
        media = [kind for part in parts for kind, _ in part.media]
        unplaced = {kind: count for part in parts for kind, count in part.unplaced.items()}
        read = self._images.kinds if self._images else {}
        if media and self._refuses_images:
            raise no_processor(media[0])
        if (media or unplaced) and not (self._images or self._refuses_images):
            raise ImagesFound
        if not self._images:
            return parsed
        for kind, count in unplaced.items():
            if kind in read:
                names = KINDS[kind]
                why = f"it has {count} {names.plural} and no {names.placeholder} in its text"
                raise BadRecord("bad_value", why)
        is_plain = isinstance(parsed, Conversation)
        resolve = self._images.resolve if is_plain else self._images.resolve_prompt
        parsed = map_conversations(parsed, lambda part: resolve(part, folder))
        if isinstance(parsed, PreferencePair) and parsed.chosen.media != parsed.rejected.media:
            raise BadRecord("bad_value", "the prompts of its two answers have other media")
        return parsed

    def _parse_record(
        self, index: int, value: Value, parsed: _ParsedBatch, folder: Folder | None
    ) -> None:
        turn = parse_record(self._its, value, self._columns)
        parts = conversations(turn)
        if self._images or any(part.media or part.unplaced for part in parts):
            turn = self._resolve_images(turn, parts, folder)
        unread: dict[str, Any] = {}
        for part in parts:
            self._variables.warn_unread(part.template_kwargs, "column chat_template_kwargs")
            unread |= unread_keys(part.messages, self._template)
        if unread:
            parsed.unread_keys.add(index, unread)
        weight = parse_weight(self._its, value)
        if isinstance(turn, Text):
            parsed.sides[0].append(Document(turn.text))
            parsed.counts["repeated_bos"] += self._special_tokens.repeats_bos(turn.text)
        elif isinstance(turn, TokenizedSample):
            parsed.tokenized.append(self._check_vocabulary(turn))
        else:
            is_plain = isinstance(turn, Conversation)
            render = self._renderer.render if is_plain else self._renderer.render_completion
            parts = conversations(turn)
            # All before any is kept: a fault of the second would leave sides of different lengths.
            documents = [render(part) for part in parts]
            for side, document in zip(parsed.sides, documents, strict=True):
                side.append(document)
            parsed.counts["without_end"] += any(document.lacks_end for document in documents)
            parsed.counts["assistant_first"] += parts[0].begins_with_assistant
            if isinstance(turn, Conversation):
                parsed.counts["blank_answers"] += turn.has_blank_answer
            elif isinstance(turn, PreferencePair):
                parsed.score_gaps.append(turn.score_gap)
            else:
                parsed.desirable.append(turn.desirable)
        parsed.weights.append(weight)

    def _check_vocabulary(self, sample: TokenizedSample) -> LabeledTokens:
        used = sample.labels[sample.labels != IGNORED]
        for name, ids in (("input_ids", sample.input_ids), ("labels", used)):
            outside = ids[(ids < 0) | (ids >= self._vocabulary)]
            if len(outside):
                why = f"{name} holds {outside[0]}; the vocabulary has tokens 0 to "
                raise BadRecord("bad_value", f"{why}{self._vocabulary - 1}")
        if self._images:
            self._images.check_ids(sample.input_ids)
        self._require_no_media_token(sample.input_ids)
        return LabeledTokens(sample.input_ids, sample.labels, sample.loss_weights)

    def _encode_sides(
        self, documents: list[list[Document]]
    ) -> tuple[list[TokenSequences], dict[int, BadRecord]]:
        sides: list[TokenSequences] = []
        faults: dict[int, BadRecord] = {}
        for of_side in documents:
            flat, bad = self._encode(of_side)
            sides.append(flat)
            faults = {**bad, **faults}
            self._loss_masker.encoder.check(
                [document.text for document in of_side], self._num_checks
            )
        self._num_checks = LATER_BATCH_CHECKS
        return sides, faults

    def _encode(self, documents: Sequence[Document]) -> tuple[TokenSequences, dict[int, BadRecord]]:
        flat = self._special_tokens.add(self._loss_masker(documents), documents)
        faults: dict[int, BadRecord] = {}
        self._require_no_media_token(flat.ids)
        if self._images:
            # `check` writes labels, which are the array of the ids where the whole text is trained.
            flat = replace(flat, labels=flat.labels.copy())
            faults = self._images.check(flat, documents)
        return flat, faults

    def _require_no_media_token(self, ids: Ids) -> None:
        """Raise ImageTokenFound for one, unless images are read or there is no processor."""
        if len(self._media_like) and np.isin(ids, self._media_like).any():
            raise ImageTokenFound

    def _truncate(
        self,
        sides: list[TokenSequences],
        parsed: _ParsedBatch,
        known_faults: Mapping[int, BadRecord],
    ) -> dict[int, BadRecord]:
        """Truncate samples in `sides` that are too long; returns the reasons of dropped samples."""
        faults: dict[int, BadRecord] = {}
        replaced: dict[int, list[LabeledTokens]] = {}
        # Both sides of a pair must fit, and both must have something to train.
        longest = np.max([side.lengths for side in sides], axis=0)
        trained = np.min([side.count_trained() for side in sides], axis=0)
        limit = self._its.max_seq_len
        of_side = [documents for documents in parsed.sides if documents]
        for sample in _samples_to_check(sides, longest, trained, limit):
            if sample in known_faults:
                continue
            completions = [side[sample] for side in sides]
            documents = [documents[sample] for documents in of_side]
            if not longest[sample]:
                faults[sample] = BadRecord("empty", "it has no tokens")
                continue
            if not trained[sample]:
                why = f"none of its {longest[sample]} tokens is trained"
                faults[sample] = BadRecord("no_trained_tokens", why)
                continue
            try:
                aligned = align_prompts(completions, documents)
                if aligned is not completions:
                    replaced[sample] = completions = aligned
                if limit is not None and longest[sample] > limit:
                    replaced[sample], turns = self._truncator(completions, documents, parsed.counts)
                    if turns and self._images:
                        for texts, document in zip(of_side, documents, strict=True):
                            assert document.drop_turns
                            # The dropped turns took their images along, and this document's are
                            # stored with the sample.
                            texts[sample] = document.drop_turns(turns)
            except BadRecord as fault:
                faults[sample] = fault
        for index, side in enumerate(sides):
            sides[index] = side.replace({sample: pair[index] for sample, pair in replaced.items()})
        if self._images and self._its.kind != "sft":
            faults = {**self._images.check_prompts(sides[0]), **faults}
        return faults


def _samples_to_check(
    sides: list[TokenSequences], longest: Any, trained: Any, limit: int | None
) -> list[int]:
    # Pairs are all checked: their prompts must be aligned.
    if len(sides) > 1:
        return list(range(len(longest)))
    is_odd = trained == 0
    if limit is not None:
        is_odd |= longest > limit
    return np.flatnonzero(is_odd).tolist()


def _train_on_prompts(flat: TokenSequences) -> TokenSequences:
    """Train all tokens up to the last trained one (`train_on_prompt`)."""
    labels = flat.labels.copy()
    weights = None if flat.weights is None else flat.weights.copy()
    for start, stop in zip(flat.offsets[:-1], flat.offsets[1:], strict=True):
        trained = np.flatnonzero(labels[start:stop] != IGNORED)
        if len(trained):
            last = start + trained[-1] + 1
            if weights is not None:
                weights[start:last][labels[start:last] == IGNORED] = 1
            labels[start:last] = flat.ids[start:last]
    return TokenSequences(flat.ids, labels, flat.offsets, weights)
