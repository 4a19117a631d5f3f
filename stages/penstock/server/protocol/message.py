"""What all messages of the server are."""

from typing import Literal, dataclass_transform

import msgspec


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """One that travels by itself, or within another: its name goes with it."""


Category = Literal["user", "server", "unknown"]
"""Who can do something about a failure."""

Code = Literal[
    "invalid",  # 400
    "not_found",  # 404
    "exists",  # 409
    "gone",  # 410
    "busy",  # 429
    "storage_limit",  # 507
    "not_finite",  # of numbers that were computed
    "cancelled",
    "lost",  # the processes that did it died
    "unavailable",  # 503
    "internal",  # 500
]
"""What kind of failure it is; with the HTTP status of calls that are answered at once."""

OURS: frozenset[Code] = frozenset({"lost", "unavailable", "internal"})
"""Kinds of failure that no client can do anything about."""


def category_of(code: Code) -> Category:
    """Who can do something about it."""
    return "server" if code in OURS else "user"
