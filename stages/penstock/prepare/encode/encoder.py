"""Encode records of one data set: parse, render, tokenize, mask and truncate.

Batches are processed as a whole; rare cases (samples that are too long, tokens across a span
border) are processed one by one and replaced in the batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from penstock.core.errors import StageError
from penstock.prepare.bad_records import BadRecord, get_column
from penstock.prepare.encode.backends import (
    FIRST_BATCH_CHECKS,
    LATER_BATCH_CHECKS,
    special_token_affixes,
)
from penstock.prepare.encode.document import Document
from penstock.prepare.encode.loss_mask import get_loss_masker
from penstock.prepare.encode.ragged import LabeledTokens, TokenSequences
from penstock.prepare.encode.render_chat import Renderer
from penstock.prepare.encode.truncate import TruncationCounts, Truncator
from penstock.prepare.formats.conversation import (
    PreferencePair,
    RatedCompletion,
    Text,
    TokenizedSample,
)
from penstock.prepare.formats.registry import FORMATS
from penstock.prepare.readers.records import Value
from penstock.prepare.settings import DatasetSettings
from penstock.rows.schema import IGNORED

NEEDS_TEMPLATE = ("chat", "sharegpt", "sft_turns")
"""Formats that require a chat template."""


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
    truncated: TruncationCounts
    blank_answers: int = 0
    """Conversations with an empty trained answer."""
    assistant_first: int = 0
    """Conversations that start with an assistant message."""


@dataclass(slots=True)
class _ParsedBatch:
    """The parsed records of a batch."""

    records: list[int] = field(default_factory=list[int])
    sides: list[list[Document]] = field(default_factory=list[list[Document]])
    """Per side, one document per record; empty for tokenized records."""
    given: list[LabeledTokens] = field(default_factory=list[LabeledTokens])
    desirable: list[bool] = field(default_factory=list[bool])
    score_gaps: list[float] = field(default_factory=list[float])
    faults: dict[int, BadRecord] = field(default_factory=dict[int, BadRecord])
    blank_answers: int = 0
    assistant_first: int = 0


class Encoder:
    """Encodes batches of records of one data set."""

    def __init__(
        self,
        its: DatasetSettings,
        tokenizer: PreTrainedTokenizerBase,
        columns: Sequence[str] | None = None,
    ) -> None:
        """`columns`: the only columns that are used (`select_columns`). Raises StageError if the
        tokenizer lacks a chat template or EOS token that the data needs, CapabilityError if the
        tokenizer is not supported."""
        if its.type in NEEDS_TEMPLATE and not tokenizer.chat_template:
            raise StageError(
                "The tokenizer has no chat template, which conversations need.\n"
                "  Add chat_template.jinja to its folder, or set model.tokenizer_path to one that "
                "has it."
            )
        self._its = its
        self._columns = columns
        self._parse = FORMATS[its.type]
        self._vocabulary = len(tokenizer)
        self._loss_masker = get_loss_masker(tokenizer)
        self._renderer = Renderer(tokenizer, its)
        self._special_tokens = _SpecialTokens(its, tokenizer)
        self._truncator = Truncator(its, self._encode)
        self._num_checks = FIRST_BATCH_CHECKS

    @property
    def fallback_reason(self) -> str:
        """Why fastokens is not used; empty if it is."""
        return self._loss_masker.encoder.fallback_reason

    @property
    def num_per_turn(self) -> int:
        """Number of conversations so far that were rendered turn by turn."""
        return self._renderer.num_per_turn

    def __call__(self, values: Sequence[Value]) -> EncodedBatch:
        """Encode a batch.

        Raises BackendMismatch if fastokens gives wrong token ids: earlier batches must be encoded
        again.
        """
        parsed = self._parse_batch(values)
        if self._its.type == "tokenized":
            sides, faults = [TokenSequences.from_list(parsed.given)], {}
        else:
            sides, faults = self._encode_sides(parsed.sides)
        desirable = dict(zip(parsed.records, parsed.desirable, strict=False))
        gaps = dict(zip(parsed.records, parsed.score_gaps, strict=False))
        cuts = TruncationCounts()
        faults |= self._truncate(sides, parsed, faults, cuts)
        usable = [place for place in range(len(parsed.records)) if place not in faults]
        parsed.faults |= {parsed.records[place]: fault for place, fault in faults.items()}
        records = [parsed.records[place] for place in usable]
        found = [side.select(usable) for side in sides]
        if self._its.train_on_prompt and self._its.kind == "sft":
            found = [_train_on_prompts(side) for side in found]
        return EncodedBatch(
            found,
            records,
            [desirable[record] for record in records if record in desirable],
            [gaps[record] for record in records if record in gaps],
            parsed.faults,
            cuts,
            parsed.blank_answers,
            parsed.assistant_first,
        )

    def _parse_batch(self, values: Sequence[Value]) -> _ParsedBatch:
        found = _ParsedBatch(sides=[[], []] if self._its.kind == "preference" else [[]])
        for place, value in enumerate(values):
            try:
                self._parse_record(value, found)
            except BadRecord as fault:
                found.faults[place] = fault
            else:
                found.records.append(place)
        return found

    def _parse_record(self, value: Value, found: _ParsedBatch) -> None:
        if isinstance(value, BadRecord):
            raise value
        if self._columns is not None:
            value = {name: get_column(value, name) for name in self._columns}
        said = self._parse(self._its, value)
        if isinstance(said, Text):
            found.sides[0].append(Document(said.text))
        elif isinstance(said, TokenizedSample):
            found.given.append(self._check_vocabulary(said))
        elif isinstance(said, PreferencePair):
            both = [self._renderer.render_completion(side) for side in (said.chosen, said.rejected)]
            for side, document in zip(found.sides, both, strict=True):
                side.append(document)
            found.assistant_first += said.chosen.begins_with_assistant
            if said.score_gap is not None:
                found.score_gaps.append(said.score_gap)
        elif isinstance(said, RatedCompletion):
            found.sides[0].append(self._renderer.render_completion(said.conversation))
            found.desirable.append(said.desirable)
            found.assistant_first += said.conversation.begins_with_assistant
        else:
            found.sides[0].append(self._renderer.render(said))
            found.blank_answers += said.has_blank_answer
            found.assistant_first += said.begins_with_assistant

    def _check_vocabulary(self, given: TokenizedSample) -> LabeledTokens:
        used = given.labels[given.labels != IGNORED]
        for name, ids in (("input_ids", given.input_ids), ("labels", used)):
            outside = ids[(ids < 0) | (ids >= self._vocabulary)]
            if len(outside):
                why = f"{name} holds {outside[0]}; the vocabulary has tokens 0 to "
                raise BadRecord("bad_value", f"{why}{self._vocabulary - 1}")
        return given.input_ids, given.labels

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
        flat, faults = self._loss_masker(documents)
        return self._special_tokens.add(flat), faults

    def _truncate(
        self,
        sides: list[TokenSequences],
        parsed: _ParsedBatch,
        known: Mapping[int, BadRecord],
        cuts: TruncationCounts,
    ) -> dict[int, BadRecord]:
        """Truncate samples in `sides` that are too long; returns the reasons of dropped samples."""
        found: dict[int, BadRecord] = {}
        shorter: dict[int, list[LabeledTokens]] = {}
        longest = np.max([side.lengths for side in sides], axis=0)
        trained = np.min([side.count_trained() for side in sides], axis=0)
        limit = self._its.max_seq_len
        of_side = [documents for documents in parsed.sides if documents]
        for place in _samples_to_check(sides, longest, trained, limit):
            if place in known:
                continue
            both = [side[place] for side in sides]
            try:
                self._check_sample(longest[place], trained[place], both)
                if limit is not None and longest[place] > limit:
                    documents = [documents[place] for documents in of_side]
                    shorter[place] = self._truncator(both, documents, cuts)
            except BadRecord as fault:
                found[place] = fault
        for index, side in enumerate(sides):
            sides[index] = side.replace({place: both[index] for place, both in shorter.items()})
        return found

    @staticmethod
    def _check_sample(longest: int, trained: int, sides: list[LabeledTokens]) -> None:
        if not longest:
            raise BadRecord("empty", "it has no tokens")
        if not trained:
            raise BadRecord("no_trained_tokens", f"none of its {longest} tokens is trained")
        if len(sides) == 1:
            return
        prompts = TokenSequences.from_list(sides).prompt_lengths()
        first, second = (ids[:prompt] for (ids, _), prompt in zip(sides, prompts, strict=True))
        if not np.array_equal(first, second):
            raise BadRecord(
                "template", "the chat template gives the prompt other tokens before each answer"
            )


def _samples_to_check(
    sides: list[TokenSequences], longest: Any, trained: Any, limit: int | None
) -> list[int]:
    """Samples to check one by one: all pairs, and samples that are too long or not trained."""
    if len(sides) > 1:
        return list(range(len(longest)))
    is_odd = trained == 0
    if limit is not None:
        is_odd |= longest > limit
    return np.flatnonzero(is_odd).tolist()


def _train_on_prompts(flat: TokenSequences) -> TokenSequences:
    """Train all tokens up to the last trained one (`train_on_prompt`)."""
    labels = flat.labels.copy()
    for start, stop in zip(flat.offsets[:-1], flat.offsets[1:], strict=True):
        trained = np.flatnonzero(labels[start:stop] != IGNORED)
        if len(trained):
            last = start + trained[-1] + 1
            labels[start:last] = flat.ids[start:last]
    return TokenSequences(flat.ids, labels, flat.offsets)


class _SpecialTokens:
    """Adds special tokens around texts without a chat template, which would write them itself."""

    def __init__(self, its: DatasetSettings, tokenizer: PreTrainedTokenizerBase) -> None:
        self._end = tokenizer.eos_token_id
        self._masks_end = its.mask_eos_in_loss
        is_text = its.type == "text"
        self._is_plain = is_text or (its.type != "tokenized" and not tokenizer.chat_template)
        before, after = special_token_affixes(tokenizer) if self._is_plain else ([], [])
        if self._is_plain and its.add_eos:
            end = _require_eos(tokenizer)
            after = after if after[-1:] == [end] else [*after, end]
        is_trained = [not (token == self._end and self._masks_end) for token in after]
        self._before = _to_labeled(before, [is_text] * len(before))
        self._after = _to_labeled(after, is_trained)

    def add(self, flat: TokenSequences) -> TokenSequences:
        """Add special tokens to every text; a text that ends with EOS gets no second one."""
        if not self._is_plain:
            return flat
        is_ended = np.zeros(len(flat), dtype=np.bool_)
        filled = flat.lengths > 0
        is_ended[filled] = flat.ids[flat.offsets[1:][filled] - 1] == self._end
        if is_ended.any():
            others: dict[int, LabeledTokens] = {}
            for place in np.flatnonzero(is_ended).tolist():
                ids, labels = flat[place]
                if self._after[0][-1:].tolist() == [self._end]:
                    others[place] = ids[:-1], labels[:-1]
                elif self._masks_end:
                    others[place] = ids, np.append(labels[:-1], np.int32(IGNORED))
            flat = flat.replace(others)
        return flat.add_affixes(self._before, self._after)


def _to_labeled(tokens: list[int], trained: list[bool]) -> LabeledTokens:
    ids = np.array(tokens, dtype=np.int32)
    return ids, np.where(np.array(trained, dtype=np.bool_), ids, np.int32(IGNORED))


def _require_eos(tokenizer: PreTrainedTokenizerBase) -> int:
    end = tokenizer.eos_token_id
    if isinstance(end, int):
        return end
    raise StageError(
        "The tokenizer has no end-of-sequence token, so the model would not learn to stop.\n"
        "  Set eos_token in its tokenizer_config.json, or set data.add_eos to false."
    )
