"""Built-in data sets, generated in code: deterministic, without files or network.

Their versions are in `penstock.core.sources.pin.BUILTIN_DATA`.
"""

from base64 import b64encode
from collections.abc import Iterable, Iterator
from typing import Any

from penstock.prepare.builtin_pictures import picture_of_shape

DUMMY_SAMPLES = 4096
DUMMY_TOKENS = 513
"""512 trained positions, and the first token, which is never trained."""

SUMS = ("What is {a} + {b}?", "{a} plus {b} is what?", "Add {a} and {b}.", "{a} + {b} =")
DIFFERENCES = ("What is {a} - {b}?", "{a} minus {b} is what?", "Take {b} from {a}.", "{a} - {b} =")


def generate(name: str) -> Iterator[dict[str, Any]]:
    """The records of a built-in data set, in their fixed order."""
    return GENERATORS[name]()


def arithmetic() -> Iterator[dict[str, Any]]:
    """Every sum of two two-digit numbers, and every difference of two digits, asked once.

    11,340 chats of one question and one answer. The answer adds or takes away the tens first, then
    the ones, and ends with the result: `47 + 38 = 77 + 8 = 85`.
    """
    for a in range(10, 100):
        for b in range(10, 100):
            yield _chat(SUMS[(a * 7 + b * 3) % len(SUMS)], a, b, "+", a + b // 10 * 10, a + b)
            if a - b >= 10:
                wording = DIFFERENCES[(a * 3 + b * 7) % len(DIFFERENCES)]
                yield _chat(wording, a, b, "-", a - b // 10 * 10, a - b)


def dummy() -> Iterator[dict[str, Any]]:
    """4,096 equal tokenized samples of 513 tokens, all of them trained: for smoke tests.

    They count `1, 2, …, 255, 0, 1, …`, so that any vocabulary has the tokens, and end with 0.
    """
    tokens = [*(number % 256 for number in range(1, DUMMY_TOKENS)), 0]
    for _ in range(DUMMY_SAMPLES):
        yield {"input_ids": tokens, "labels": tokens}


def shapes() -> Iterator[dict[str, Any]]:
    """1,000 pictures of 32 x 32 pixels, each of one shape, and the question what is in it.

    The answer names one of six colours and of four shapes: `a red circle`. Sizes, places and the
    grey behind differ.
    """
    yield from shape_chats(range(1000))


def shape_chats(seeds: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Chats about the pictures of `picture_of_shape`."""
    for seed in seeds:
        answer, picture = picture_of_shape(seed)
        question = [
            {"type": "image", "base64": b64encode(picture).decode()},
            {"type": "text", "text": "What is it?"},
        ]
        yield {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        }


def _chat(wording: str, a: int, b: int, sign: str, tens: int, result: int) -> dict[str, Any]:
    answer = f"{a} {sign} {b} = {tens} {sign} {b % 10} = {result}"
    return {
        "messages": [
            {"role": "user", "content": wording.format(a=a, b=b)},
            {"role": "assistant", "content": answer},
        ]
    }


GENERATORS = {"arithmetic": arithmetic, "shapes": shapes, "dummy": dummy}
