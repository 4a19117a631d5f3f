"""Final answers of completions that end with one: after `####` (GSM8K), in `\\boxed{}` (MATH), or a
number that ends the last of several lines."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

SHARE = 0.9  # Minimum share of the expected completions that have a final answer of one kind

NUMBER = r"[-+]?\$?\d[\d,]*(?:\.\d+)?"
HASHES = re.compile(r"####[ \t]*(\S[^\n]*)")
LAST_LINE = re.compile(rf"\n[^\n]*?({NUMBER})[\s.%*]*\Z")


@dataclass(frozen=True)
class FinalAnswer:
    """How final answers are found in completions."""

    name: str  # What is compared, in words
    find: Callable[[str], str | None]
    """The final answer of an expected completion; None if it has none."""

    def is_right(self, reply: str, expected: str) -> bool:
        """Whether the completions have equal final answers. A number may also be the last one of a
        completion in another form."""
        expected_answer = self.find(expected)
        if expected_answer is None:
            return False
        answer = self.find(reply)
        if answer is None and _number(expected_answer) is not None:
            answer = last_number(reply)
        if answer is None:
            return False
        numbers = _number(answer), _number(expected_answer)
        if None not in numbers:
            return numbers[0] == numbers[1]
        return _plain(answer) == _plain(expected_answer)


def final_answers(expected: Sequence[str]) -> FinalAnswer | None:
    """The kind of final answer that nearly all expected completions have, if any."""
    kinds = (
        FinalAnswer("final answers, after ####", after_hashes),
        FinalAnswer(r"final answers, in \boxed{}", in_box),
        FinalAnswer("final answers, the number that ends the last line", on_last_line),
    )
    least = max(SHARE * len(expected), 1)
    return next((k for k in kinds if sum(k.find(t) is not None for t in expected) >= least), None)


def after_hashes(text: str) -> str | None:
    """What follows the last `####`."""
    answers = HASHES.findall(text)
    return answers[-1].strip() if answers else None


def in_box(text: str) -> str | None:
    """The content of the last `\\boxed{}`, which may have braces of its own."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    start += len(r"\boxed{")
    depth = 1
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if not depth:
            return text[start:index].strip()
    return None


def on_last_line(text: str) -> str | None:
    """The number that ends the last of several lines."""
    match = LAST_LINE.search(text.strip())
    return match[1] if match else None


def last_number(text: str) -> str | None:
    """The last number in the text."""
    numbers = re.findall(NUMBER, text)
    return numbers[-1] if numbers else None


def _plain(text: str) -> str:
    return "".join(text.rstrip(".").split())


def _number(text: str) -> Decimal | None:
    try:
        # Decimal: 0.50 equals .5, and large numbers are not rounded to a float's.
        return Decimal(_plain(text).replace(",", "").replace("$", "").removesuffix("%"))
    except InvalidOperation:
        return None
