"""Find ranges of characters of a message's content in the rendered text, which may have the content
without white space around it, beside reasoning and calls, or with reasoning taken out of it."""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

Range = tuple[int, int]
"""[start, stop) in characters."""

OPEN, CLOSE = "\ue002", "\ue003"
"""Characters that no template has itself."""
MARKS = re.compile(f"[{OPEN}{CLOSE}]")


def locate_ranges(
    content: str,
    ranges: Sequence[Range],
    text: str,
    word_range: Range,
    render: Callable[[str], str | None],
) -> list[Range] | None:
    """The `ranges` of `content` in `text`, which has the words of its message in `word_range`.

    `render` gives the text with another content in its place; None if it has none. Returns None if
    the template changes the content so that the ranges are not known.
    """
    if not ranges:
        return []
    core = content.strip()
    start, stop = word_range
    if text.count(core, start, stop) != 1:
        return _locate_marked(content, ranges, text, word_range, render)
    # White space around the content is trained where the template leaves it.
    begin = text.index(core, start, stop)
    lead = len(content) - len(content.lstrip())
    shift = begin - lead
    first = begin - _common(text[start:begin][::-1], content[:lead][::-1])
    end = begin + len(core)
    last = end + _common(text[end:stop], content[lead + len(core) :])
    clipped = [(max(a + shift, first), min(b + shift, last)) for a, b in ranges]
    return [(a, b) for a, b in clipped if a < b]


def _locate_marked(
    content: str,
    ranges: Sequence[Range],
    text: str,
    word_range: Range,
    render: Callable[[str], str | None],
) -> list[Range] | None:
    """By the places of characters before and behind each range, where templates do not strip."""
    trimmed = [_without_blanks(content, *span) for span in ranges]
    borders = [0, *(border for span in trimmed for border in span), len(content)]
    parts = [content[a:b] for a, b in pairwise(borders)]
    marks = [OPEN, CLOSE] * len(ranges)
    marked = parts[0] + "".join(m + p for m, p in zip(marks, parts[1:], strict=True))
    shown = render(marked)
    if shown is None or MARKS.sub("", shown) != text:
        return None
    positions = [mark.start() - number for number, mark in enumerate(MARKS.finditer(shown))]
    if len(positions) != len(marks):
        return None
    located: list[Range] = []
    pairs = zip(positions[::2], positions[1::2], strict=True)
    for (begin, end), (a, b), (start, stop) in zip(pairs, ranges, trimmed, strict=True):
        before = _common(text[word_range[0] : begin][::-1], content[a:start][::-1])
        after = _common(text[end : word_range[1]], content[stop:b])
        located.append((begin - before, end + after))
    return located


def _without_blanks(content: str, start: int, stop: int) -> Range:
    """The range without white space at its ends; the range itself if it has nothing else."""
    inside = content[start:stop]
    if not inside.strip():
        return start, stop
    return start + len(inside) - len(inside.lstrip()), start + len(inside.rstrip())


def _common(first: str, second: str) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
