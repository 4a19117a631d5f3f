"""What a field has to do with the cache key of training, declared with its type.

`lr: Keyed[float]` is part of the key, and `output_dir: Unkeyed[str]` is not: a field that alters
the mathematics is keyed, and where and how fast something runs never builds it again. Every field
of `model`, `train` and `lora` says one of these. `identity.py` reads them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from penstock.config.schema.base import ConfigSection

T = TypeVar("T")

Role = Literal["always", "unless default", "by content", "if evaluations decide", "never"]


@dataclass(frozen=True)
class CacheKey:
    """When a field is part of the key."""

    role: Role
    null: Any = None
    """What the key holds where the field is null."""


Keyed = Annotated[T, CacheKey("always")]
"""As it is written."""

KeyedUnlessDefault = Annotated[T, CacheKey("unless default")]
"""The same, but for its default: what a field is that came later, so that older results stay valid.
Of a section each field is left out that has its default."""

KeyedByContent = Annotated[T, CacheKey("by content")]
"""By what it stands for: the content of a source, or the rows of a step."""

KeyedIfEvaluated = Annotated[T, CacheKey("if evaluations decide")]
"""Where evaluations decide when a run ends or which checkpoint is its result."""

Unkeyed = Annotated[T, CacheKey("never")]
"""Not at all."""


def cache_key(section: type[ConfigSection], name: str) -> CacheKey:
    """What is declared of a field. Raises KeyError where nothing is."""
    found = [part for part in section.model_fields[name].metadata if isinstance(part, CacheKey)]
    if not found:
        raise KeyError(f"{section.__name__}.{name} says nothing of the cache key")
    return found[0]


def fields_keyed(section: type[ConfigSection], *roles: Role) -> frozenset[str]:
    """The fields of a section with one of these roles."""
    names = section.model_fields
    return frozenset(name for name in names if cache_key(section, name).role in roles)


def key_defaults(section: type[ConfigSection], at: str) -> Iterator[tuple[str, Any]]:
    """The dotted names, beginning with `at`, of what is left out of a key at its default, and that
    default as JSON."""
    for name in section.model_fields:
        if cache_key(section, name).role != "unless default":
            continue
        default = section.model_fields[name].get_default(call_default_factory=True)
        if isinstance(default, ConfigSection):
            for inner, value in default.model_dump(mode="json").items():
                yield f"{at}.{name}.{inner}", value
            yield f"{at}.{name}", {}
        else:
            yield f"{at}.{name}", default
