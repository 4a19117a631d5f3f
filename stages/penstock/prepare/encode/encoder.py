"""Records of one data set as samples: parsed, rendered, encoded, marked and cut to length.

A batch of records goes through as a whole; what is rare (a sample that is too long, a token astride
a border) is done one by one and put in its place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from penstock.core.errors import StageError
from penstock.prepare.bad_records import BadRow, column
from penstock.prepare.encode.backends import CHECKED_AT_FIRST, CHECKED_LATER, special_token_frame
from penstock.prepare.encode.document import Document
from penstock.prepare.encode.loss_mask import marker
from penstock.prepare.encode.ragged import Flat, Labelled
from penstock.prepare.encode.render_chat import Renderer
from penstock.prepare.encode.truncate import Cuts, Fitter
from penstock.prepare.formats.conversation import Pair, RatedAnswer
from penstock.prepare.formats.registry import FORMATS
from penstock.prepare.formats.sample import Ids, Text
from penstock.prepare.settings import DatasetSettings
from penstock.rows.schema import IGNORED

NEEDS_TEMPLATE = ("chat", "sharegpt", "sft_turns")
"""Formats of whole conversations, which have no form without a chat template."""

Value = dict[str, Any] | BadRow
"""A record, or why it could not be read."""


@dataclass(slots=True)
class Samples:
    """The samples of a batch of records: `sides[s]` holds one sequence for each of them.

    There are two sides in pairs (the chosen one, then the rejected one) and one in all else.
    """

    sides: list[Flat]
    records: list[int]
    """Which of the batch's records each sample is of, in order."""
    desirable: list[bool]
    """The verdicts on judged answers, and none on anything else."""
    score_gaps: list[float]
    """By how much better one answer is scored than the other, of scored pairs."""
    faults: dict[int, BadRow]
    """Why the other records give no sample."""
    cuts: Cuts
    blank_answers: int = 0
    """Conversations with an answer that is trained and says nothing."""
    assistant_first: int = 0
    """Conversations that begin with the assistant."""


@dataclass(slots=True)
class _Parsed:
    """What the usable records of a batch say."""

    records: list[int] = field(default_factory=list[int])
    sides: list[list[Document]] = field(default_factory=list[list[Document]])
    """One list for each side, one document for each record. None of them where tokens are given."""
    given: list[Labelled] = field(default_factory=list[Labelled])
    desirable: list[bool] = field(default_factory=list[bool])
    score_gaps: list[float] = field(default_factory=list[float])
    faults: dict[int, BadRow] = field(default_factory=dict[int, BadRow])
    blank_answers: int = 0
    assistant_first: int = 0


class Encoder:
    """Batches of records of one data set to samples."""

    def __init__(
        self,
        its: DatasetSettings,
        tokenizer: PreTrainedTokenizerBase,
        columns: Sequence[str] | None = None,
    ) -> None:
        """`columns` are the only ones a record may use. Raises StageError if the tokenizer lacks
        what the data needs, CapabilityError if it is one that cannot be used exactly."""
        if its.type in NEEDS_TEMPLATE and not tokenizer.chat_template:
            raise StageError(
                "The tokenizer has no chat template, so conversations have no form.\n"
                "  Add chat_template.jinja to its folder, or set model.tokenizer_path to one that "
                "has it."
            )
        self._its = its
        self._columns = columns
        self._parse = FORMATS[its.type]
        self._vocabulary = len(tokenizer)
        self._marker = marker(tokenizer)
        self._render = Renderer(tokenizer, its)
        self._frame = _Frame(its, tokenizer)
        self._fit = Fitter(its, self._encoded)
        self._check = CHECKED_AT_FIRST

    @property
    def note(self) -> str:
        """Why texts are not encoded by the fast library; empty where they are."""
        return self._marker.encoder.note

    @property
    def rendered_by_turn(self) -> int:
        """Conversations so far whose turns the chat template shows differently once others
        follow."""
        return self._render.by_turn

    def __call__(self, values: Sequence[Value]) -> Samples:
        """The samples of a batch.

        Raises Disagreement when the library that encodes fast is found to be inexact: what came
        of earlier batches is then to be made again.
        """
        parsed = self._parsed(values)
        if self._its.type == "tokenized":
            sides, faults = [Flat.of_all(parsed.given)], {}
        else:
            sides, faults = self._sides(parsed.sides)
        desirable = dict(zip(parsed.records, parsed.desirable, strict=False))
        gaps = dict(zip(parsed.records, parsed.score_gaps, strict=False))
        cuts = Cuts()
        faults |= self._fitted(sides, parsed, faults, cuts)
        usable = [place for place in range(len(parsed.records)) if place not in faults]
        parsed.faults |= {parsed.records[place]: fault for place, fault in faults.items()}
        records = [parsed.records[place] for place in usable]
        found = [side.kept(usable) for side in sides]
        if self._its.train_on_prompt and self._its.kind == "sft":
            found = [_with_prompts(side) for side in found]
        return Samples(
            found,
            records,
            [desirable[record] for record in records if record in desirable],
            [gaps[record] for record in records if record in gaps],
            parsed.faults,
            cuts,
            parsed.blank_answers,
            parsed.assistant_first,
        )

    def _parsed(self, values: Sequence[Value]) -> _Parsed:
        found = _Parsed(sides=[[], []] if self._its.kind == "preference" else [[]])
        for place, value in enumerate(values):
            try:
                self._read(value, found)
            except BadRow as fault:
                found.faults[place] = fault
            else:
                found.records.append(place)
        return found

    def _read(self, value: Value, found: _Parsed) -> None:
        if isinstance(value, BadRow):
            raise value
        if self._columns is not None:
            value = {name: column(value, name) for name in self._columns}
        said = self._parse(self._its, value)
        if isinstance(said, Text):
            found.sides[0].append(Document(said.text))
        elif isinstance(said, Ids):
            found.given.append(self._checked(said))
        elif isinstance(said, Pair):
            both = [self._render.answered(side) for side in (said.chosen, said.rejected)]
            for side, document in zip(found.sides, both, strict=True):
                side.append(document)
            found.assistant_first += said.chosen.begins_with_assistant
            if said.score_gap is not None:
                found.score_gaps.append(said.score_gap)
        elif isinstance(said, RatedAnswer):
            found.sides[0].append(self._render.answered(said.conversation))
            found.desirable.append(said.desirable)
            found.assistant_first += said.conversation.begins_with_assistant
        else:
            found.sides[0].append(self._render.conversation(said))
            found.blank_answers += said.has_blank_answer
            found.assistant_first += said.begins_with_assistant

    def _checked(self, given: Ids) -> Labelled:
        used = given.labels[given.labels != IGNORED]
        for name, ids in (("input_ids", given.input_ids), ("labels", used)):
            outside = ids[(ids < 0) | (ids >= self._vocabulary)]
            if len(outside):
                why = f"{name} holds {outside[0]}; the vocabulary has tokens 0 to "
                raise BadRow("bad_value", f"{why}{self._vocabulary - 1}")
        return given.input_ids, given.labels

    def _sides(self, documents: list[list[Document]]) -> tuple[list[Flat], dict[int, BadRow]]:
        sides: list[Flat] = []
        faults: dict[int, BadRow] = {}
        for of_side in documents:
            flat, bad = self._encoded(of_side)
            sides.append(flat)
            faults = {**bad, **faults}
            self._marker.encoder.check([document.text for document in of_side], self._check)
        self._check = CHECKED_LATER
        return sides, faults

    def _encoded(self, documents: Sequence[Document]) -> tuple[Flat, dict[int, BadRow]]:
        flat, faults = self._marker(documents)
        return self._frame.around(flat), faults

    def _fitted(
        self, sides: list[Flat], parsed: _Parsed, known: Mapping[int, BadRow], cuts: Cuts
    ) -> dict[int, BadRow]:
        """Put samples that are too long into `sides` shortened; the faults of the unusable."""
        found: dict[int, BadRow] = {}
        shorter: dict[int, list[Labelled]] = {}
        longest = np.max([side.lengths for side in sides], axis=0)
        trained = np.min([side.trained() for side in sides], axis=0)
        limit = self._its.max_seq_len
        of_side = [documents for documents in parsed.sides if documents]
        for place in _looked_at(sides, longest, trained, limit):
            if place in known:
                continue
            both = [side[place] for side in sides]
            try:
                self._require(longest[place], trained[place], both)
                if limit is not None and longest[place] > limit:
                    documents = [documents[place] for documents in of_side]
                    shorter[place] = self._fit(both, documents, cuts)
            except BadRow as fault:
                found[place] = fault
        for index, side in enumerate(sides):
            sides[index] = side.replaced({place: both[index] for place, both in shorter.items()})
        return found

    @staticmethod
    def _require(longest: int, trained: int, sides: list[Labelled]) -> None:
        if not longest:
            raise BadRow("empty", "it has no tokens")
        if not trained:
            raise BadRow("no_trained_tokens", f"none of its {longest} tokens is trained")
        if len(sides) == 1:
            return
        prompts = Flat.of_all(sides).prompts()
        first, second = (ids[:prompt] for (ids, _), prompt in zip(sides, prompts, strict=True))
        if not np.array_equal(first, second):
            raise BadRow(
                "template", "the chat template gives the prompt other tokens before each answer"
            )


def _looked_at(sides: list[Flat], longest: Any, trained: Any, limit: int | None) -> list[int]:
    """Samples that need a look of their own: all pairs, and what is too long or not trained."""
    if len(sides) > 1:
        return list(range(len(longest)))
    is_odd = trained == 0
    if limit is not None:
        is_odd |= longest > limit
    return np.flatnonzero(is_odd).tolist()


def _with_prompts(flat: Flat) -> Flat:
    """Trained from the start to the last token that is trained anyhow."""
    labels = flat.labels.copy()
    for start, stop in zip(flat.offsets[:-1], flat.offsets[1:], strict=True):
        trained = np.flatnonzero(labels[start:stop] != IGNORED)
        if len(trained):
            last = start + trained[-1] + 1
            labels[start:last] = flat.ids[start:last]
    return Flat(flat.ids, labels, flat.offsets)


class _Frame:
    """The special tokens around a text, which a chat template writes itself."""

    def __init__(self, its: DatasetSettings, tokenizer: PreTrainedTokenizerBase) -> None:
        self._end = tokenizer.eos_token_id
        self._masks_end = its.mask_eos_in_loss
        is_text = its.type == "text"
        self._is_plain = is_text or (its.type != "tokenized" and not tokenizer.chat_template)
        before, after = special_token_frame(tokenizer) if self._is_plain else ([], [])
        if self._is_plain and its.add_eos:
            end = _end_of(tokenizer)
            after = after if after[-1:] == [end] else [*after, end]
        is_trained = [not (token == self._end and self._masks_end) for token in after]
        self._before = _labelled(before, [is_text] * len(before))
        self._after = _labelled(after, is_trained)

    def around(self, flat: Flat) -> Flat:
        """Every text with them, but no second end where it ends with one."""
        if not self._is_plain:
            return flat
        is_ended = np.zeros(len(flat), dtype=np.bool_)
        filled = flat.lengths > 0
        is_ended[filled] = flat.ids[flat.offsets[1:][filled] - 1] == self._end
        if is_ended.any():
            others: dict[int, Labelled] = {}
            for place in np.flatnonzero(is_ended).tolist():
                ids, labels = flat[place]
                if self._after[0][-1:].tolist() == [self._end]:
                    others[place] = ids[:-1], labels[:-1]
                elif self._masks_end:
                    others[place] = ids, np.append(labels[:-1], np.int32(IGNORED))
            flat = flat.replaced(others)
        return flat.framed(self._before, self._after)


def _labelled(tokens: list[int], trained: list[bool]) -> Labelled:
    ids = np.array(tokens, dtype=np.int32)
    return ids, np.where(np.array(trained, dtype=np.bool_), ids, np.int32(IGNORED))


def _end_of(tokenizer: PreTrainedTokenizerBase) -> int:
    end = tokenizer.eos_token_id
    if isinstance(end, int):
        return end
    raise StageError(
        "The tokenizer has no end-of-sequence token, so nothing would teach the model to stop.\n"
        "  Set eos_token in its tokenizer_config.json, or set data.add_eos to false."
    )
