"""Cases of a matrix, and tests that start many processes, take turns: a few each day, and all of
them within some days.

The day is a number in the environment, which the head of a test run shows: with it the same are run
again. With `TEST_DAY=every`, whatever has a day is run. All cases are run with
`pytest -m "exhaustive or not exhaustive"`.
"""

import datetime
import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

TODAY = os.environ.setdefault("TEST_DAY", str(datetime.date.today().toordinal()))
"""Set for the other processes of this run too, which must collect the same across midnight."""
EVERY = TODAY == "every"
DAY = 0 if EVERY else int(TODAY)


def todays(cases: Sequence[T], count: int) -> list[T]:
    """`count` of the cases, the next ones each day, in their order."""
    chosen = {(DAY * count + at) % len(cases) for at in range(count)}
    return [case for at, case in enumerate(cases) if at in chosen]


def taking_turns(cases: Iterable[Any], count: int) -> list[Any]:
    """The cases as parameters, of which all but today's are exhaustive."""
    cases = list(cases)
    today = todays(range(len(cases)), count)
    return [
        case if at in today else pytest.param(case, marks=pytest.mark.exhaustive)
        for at, case in enumerate(cases)
    ]


def over_days(cases: Iterable[Any], days: int) -> list[Any]:
    """The cases as parameters, spread evenly over so many days."""
    return [pytest.param(case, marks=one_day_in(days, of=at)) for at, case in enumerate(cases)]


def hundred(daily: int) -> list[Any]:
    """Seeds below 100 as parameters: the first every day, the others spread over four."""
    return [range(daily), *over_days([range(daily + at, 100, 4) for at in range(4)], 4)]


def one_day_in(days: int, *, of: int) -> pytest.MarkDecorator:
    """Marks a test as slow on the day with the remainder `of`, and as exhaustive on the others."""
    is_today = EVERY or DAY % days == of % days
    return pytest.mark.slow if is_today else pytest.mark.exhaustive
