"""Truncate samples to `max_seq_len`, and count what is cut.

Turns are dropped by rendering the conversation again without them, so that the rest is rendered as
a conversation of its own. As few turns as possible are dropped.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.prepare.bad_records import BadRecord
from penstock.prepare.encode.document import Document
from penstock.prepare.encode.images import CUT
from penstock.prepare.encode.ragged import LabeledTokens, TokenSequences
from penstock.prepare.settings import DatasetSettings
from penstock.rows.schema import IGNORED

Range = tuple[int, int]
"""[start, stop) in tokens."""


@dataclass(frozen=True)
class TruncatedLengths:
    """Token ranges of the prompt and of each answer that are kept."""

    prompt: Range
    answers: tuple[Range, ...]


def truncated_lengths(
    prompt: int, answers: Sequence[int], settings: DatasetSettings
) -> TruncatedLengths | None:
    """Ranges to keep of a prompt and its answers, given their lengths; None to drop the sample.

    Prompt and answer together have at most `max_seq_len` tokens; the prompt range is the same for
    all answers. First the prompt is cut to `max_prompt_len`. Then `keep_end` cuts the start of the
    prompt, and of an answer only if that is not enough; `keep_start`, and `drop_turns` after
    dropping turns, cut the end; `drop` drops the sample.
    """
    limit = settings.max_seq_len
    everything = TruncatedLengths((0, prompt), tuple((0, answer) for answer in answers))
    if limit is None or prompt + max(answers) <= limit:
        return everything
    first, last = 0, prompt
    if settings.max_prompt_len is not None and prompt > settings.max_prompt_len:
        if settings.truncation_mode == "keep_start":
            last = settings.max_prompt_len
        else:
            first = prompt - settings.max_prompt_len
    over = (last - first) + max(answers) - limit
    if over <= 0:
        return TruncatedLengths((first, last), everything.answers)
    if settings.truncation_mode == "drop":
        return None
    if settings.truncation_mode == "keep_end":
        first = min(first + over, last)
        return TruncatedLengths((first, last), tuple((max(0, n - limit), n) for n in answers))
    last = min(last, first + limit)
    room = limit - (last - first)
    return TruncatedLengths((first, last), tuple((0, min(n, room)) for n in answers))


Encode = Callable[[Sequence[Document]], tuple[TokenSequences, dict[int, BadRecord]]]


def align_prompts(sides: list[LabeledTokens], documents: Sequence[Document]) -> list[LabeledTokens]:
    """The sides of a sample, trained from the first token on in which they differ; the same list if
    they already are.

    A token may contain the end of the prompt and the beginning of an answer. It is trained, and so
    are the tokens that another side has in its place. Raises BadRecord if the prompts are different
    texts.
    """
    if len(sides) == 1:
        return sides
    texts = {document.text[: document.spans[0].start] for document in documents if document.spans}
    prompts = [_prompt_length(side) for side in sides]
    shortest = min(prompts)
    if len(texts) > 1 or len({side.ids[:shortest].tobytes() for side in sides}) > 1:
        raise BadRecord(
            "template", "the chat template gives the prompt other tokens before each answer"
        )
    if shortest == max(prompts):
        return sides
    aligned = list(sides)
    for index, (side, prompt) in enumerate(zip(sides, prompts, strict=True)):
        labels, weights = side.labels.copy(), side.weights
        labels[shortest:prompt] = side.ids[shortest:prompt]
        if weights is not None and shortest < prompt < len(weights):
            weights = weights.copy()
            weights[shortest:prompt] = weights[prompt]
        aligned[index] = LabeledTokens(side.ids, labels, weights)
    return aligned


def _prompt_length(side: LabeledTokens) -> int:
    """Number of tokens before the first trained one; all if none is trained."""
    is_trained = side.labels != IGNORED
    return int(is_trained.argmax()) if is_trained.any() else len(is_trained)


class Truncator:
    """Truncates samples; `encode` encodes shortened documents."""

    def __init__(
        self, settings: DatasetSettings, encode: Encode, media_token_ids: Sequence[int] = ()
    ) -> None:
        """`media_token_ids`: the tokens of media, which are never cut."""
        self._its = settings
        self._encode = encode
        self._media_token_ids = media_token_ids

    def __call__(
        self, sides: Sequence[LabeledTokens], documents: Sequence[Document], counts: Counter[str]
    ) -> tuple[list[LabeledTokens], int]:
        """Truncate the sides of one sample to `max_seq_len`; returns them, and the number of oldest
        turns that were dropped. Raises BadRecord for a dropped sample.

        `documents` are the sides before encoding; empty for tokenized records.
        """
        lengths = [len(side.ids) for side in sides]
        truncated, turns = list(sides), 0
        if self._its.truncation_mode == "drop_turns" and documents:
            truncated, turns = self._drop_turns(truncated, documents)
        truncated = self._cut_tokens(truncated)
        if not TokenSequences.from_list(truncated).count_trained().all():
            limit = self._its.max_seq_len
            why = f"nothing to train in what is left of {max(lengths)} tokens (max_seq_len {limit})"
            raise BadRecord("no_trained_tokens", why)
        counts["truncated"] += 1
        counts["tokens_cut"] += sum(lengths) - sum(len(side.ids) for side in truncated)
        counts["turns_dropped"] += turns
        return truncated, turns

    def _drop_turns(
        self, sides: list[LabeledTokens], documents: Sequence[Document]
    ) -> tuple[list[LabeledTokens], int]:
        """Drop as few of the oldest turns as possible; the last turn is always kept."""
        fewest, most = 0, min(document.droppable_turns for document in documents)
        if not most:
            return sides, 0
        shortest = self._encode_without(documents, most)
        if not self._fits(shortest):
            return shortest, most
        # Each try renders and encodes the conversation, so the number of turns is bisected.
        while most - fewest > 1:
            turns = (fewest + most) // 2
            shorter = self._encode_without(documents, turns)
            if self._fits(shorter):
                most, shortest = turns, shorter
            else:
                fewest = turns
        return shortest, most

    def _encode_without(self, documents: Sequence[Document], turns: int) -> list[LabeledTokens]:
        shorter = [d.drop_turns(turns) for d in documents if d.drop_turns]
        flat, faults = self._encode(shorter)
        for fault in faults.values():
            raise fault
        return align_prompts([flat[index] for index in range(len(flat))], shorter)

    def _fits(self, sides: Sequence[LabeledTokens]) -> bool:
        assert self._its.max_seq_len is not None
        return max(len(side.ids) for side in sides) <= self._its.max_seq_len

    def _cut_tokens(self, sides: list[LabeledTokens]) -> list[LabeledTokens]:
        """Cut tokens according to `truncated_lengths`. All sides start with the same prompt."""
        prompt = _prompt_length(sides[0])
        stays = truncated_lengths(prompt, [len(side.ids) - prompt for side in sides], self._its)
        if stays is None:
            limit = self._its.max_seq_len
            why = f"{max(len(side.ids) for side in sides)} tokens where max_seq_len is {limit}"
            raise BadRecord("too_long", why)
        first = slice(*stays.prompt)
        cut_sides = [
            side.cut(first, slice(prompt + start, prompt + stop))
            for side, (start, stop) in zip(sides, stays.answers, strict=True)
        ]
        if self._count_media_tokens(cut_sides) < self._count_media_tokens(sides):
            raise BadRecord("too_long", CUT)
        return cut_sides

    def _count_media_tokens(self, sides: Sequence[LabeledTokens]) -> int:
        if not self._media_token_ids:
            return 0
        return sum(
            int(np.count_nonzero(np.isin(side.ids, self._media_token_ids))) for side in sides
        )
