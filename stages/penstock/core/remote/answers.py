"""Proof of a store's answers: the version, the range and the progress that were required.

A store that answers with other bytes than those that were requested is an error here, whatever its
status says.
"""

import re
from collections.abc import AsyncIterator, Callable

LEAST_PROGRESS, PROGRESS_SECONDS = 4096, 30.0
"""A transfer that gets fewer bytes than this in so many seconds has stalled."""

_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")


class AnswerError(Exception):
    """An answer that does not hold what was requested. Its text is written for users."""


class ChangedError(AnswerError):
    """The file has another version than the one that was requested."""

    status = 412


class StalledError(AnswerError, ConnectionError):
    """A transfer without progress, or one that was cut."""


def parse_content_range(text: str | None) -> tuple[int | None, int | None, int | None]:
    """(start, stop, total) of a Content-Range header, `stop` exclusive; None for what it lacks."""
    match = _CONTENT_RANGE.fullmatch((text or "").strip())
    if match is None:
        return None, None, None
    first, last, total = match.groups()
    stop = None if last is None else int(last) + 1
    start = None if first is None else int(first)
    return start, stop, None if total == "*" else int(total)


def require_range(content_range: str | None, start: int, stop: int, total: int) -> None:
    """Raise AnswerError unless the answer holds bytes `start` to `stop` of `total`."""
    first, last, length = parse_content_range(content_range)
    if length is not None and length != total:
        raise ChangedError(f"it had {total} bytes and has {length}")
    if (first, last) != (start, stop):
        raise AnswerError(
            f"the server was asked for bytes {start}-{stop - 1} and answered "
            f"{content_range or 'without Content-Range'}"
        )


async def receive(
    chunks: AsyncIterator[bytes], write: Callable[[bytes], object], expected: int | None
) -> None:
    """Write the chunks as they arrive. Raises StalledError if fewer than `expected` bytes come, and
    AnswerError before more are written: a body may never end."""
    import asyncio  # thirty modules, which a finished run does without

    clock = asyncio.get_running_loop().time
    length, mark, since = 0, 0, clock()
    while True:
        try:
            remaining = since + PROGRESS_SECONDS - clock()
            # At a timeout of 0, wait_for cancels before it looks for a chunk that has already
            # arrived.
            chunk = await asyncio.wait_for(anext(chunks), max(remaining, 0.001))
        except StopAsyncIteration:
            break
        except TimeoutError:
            raise StalledError(
                f"the server sent {length - mark} bytes in {PROGRESS_SECONDS:g} s"
            ) from None
        length += len(chunk)
        if expected is not None and length > expected:
            raise AnswerError(f"more than the {expected} bytes that were requested arrived")
        write(chunk)
        if length - mark >= LEAST_PROGRESS:
            mark, since = length, clock()
    if expected is not None and length != expected:
        raise StalledError(f"{length} of {expected} bytes arrived")


def write_block(block: bytes, expected: int, write: Callable[[bytes], object]) -> None:
    """Write an answer that a library has read whole. Raises as `receive`."""
    if len(block) > expected:
        raise AnswerError(f"{len(block)} bytes arrived where {expected} were requested")
    write(block)
    if len(block) < expected:
        raise StalledError(f"{len(block)} of {expected} bytes arrived")
