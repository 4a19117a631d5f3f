"""What a sample keeps when it is longer than it may be. Pure arithmetic of lengths."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.prepare.settings import DatasetSettings

Range = tuple[int, int]
"""Tokens from the first number up to the second."""


@dataclass(frozen=True)
class TruncatedLengths:
    """Tokens of the prompt, and of each answer to it, that stay."""

    prompt: Range
    answers: tuple[Range, ...]


def truncated_lengths(
    prompt: int, answers: Sequence[int], its: DatasetSettings
) -> TruncatedLengths | None:
    """What stays of a prompt and its answers, given their lengths; None if nothing does.

    Each answer makes a sample with the prompt, the same for all of them, and no sample is longer
    than `max_seq_len`. First the prompt is shortened to `max_prompt_len`. Then `keep_end` takes
    from the start of the prompt, and from an answer's start only what the prompt cannot give;
    `keep_start`, and `drop_turns` once it has dropped what it may, take from the end; `drop`
    leaves the sample out.
    """
    limit = its.max_seq_len
    everything = TruncatedLengths((0, prompt), tuple((0, answer) for answer in answers))
    if limit is None or prompt + max(answers) <= limit:
        return everything
    first, last = 0, prompt
    if its.max_prompt_len is not None and prompt > its.max_prompt_len:
        if its.truncation_mode == "keep_start":
            last = its.max_prompt_len
        else:
            first = prompt - its.max_prompt_len
    over = (last - first) + max(answers) - limit
    if over <= 0:
        return TruncatedLengths((first, last), everything.answers)
    if its.truncation_mode == "drop":
        return None
    if its.truncation_mode == "keep_end":
        first = min(first + over, last)
        return TruncatedLengths((first, last), tuple((max(0, n - limit), n) for n in answers))
    last = min(last, first + limit)
    room = limit - (last - first)
    return TruncatedLengths((first, last), tuple((0, min(n, room)) for n in answers))
