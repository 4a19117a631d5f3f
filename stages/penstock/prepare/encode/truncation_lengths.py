"""Which tokens of a truncated sample are kept; pure arithmetic of lengths."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.prepare.settings import DatasetSettings

Range = tuple[int, int]
"""[start, stop) in tokens."""


@dataclass(frozen=True)
class TruncatedLengths:
    """Token ranges of the prompt and of each answer that are kept."""

    prompt: Range
    answers: tuple[Range, ...]


def truncated_lengths(
    prompt: int, answers: Sequence[int], its: DatasetSettings
) -> TruncatedLengths | None:
    """Ranges to keep of a prompt and its answers, given their lengths; None to drop the sample.

    Prompt and answer together have at most `max_seq_len` tokens; the prompt range is the same for
    all answers. First the prompt is cut to `max_prompt_len`. Then `keep_end` cuts the start of the
    prompt, and of an answer only if that is not enough; `keep_start`, and `drop_turns` after
    dropping turns, cut the end; `drop` drops the sample.
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
