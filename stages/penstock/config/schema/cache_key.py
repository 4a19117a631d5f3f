"""Whether a field is part of the cache key of training, declared with its type.

`lr: Keyed[float]` is part of the key, and `output_dir: Unkeyed[str]` is not. A field that changes
the trained weights is keyed; a field that says where or how fast something runs is not, so changing
it never trains again. Every field of `model`, `train` and `lora` declares one of these;
`config/identity.py` reads them.
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
    # A property of the section whose value the key contains instead of the field's, so that values
    # that mean the same have one key.
    value: str | None = None


# Part of the key, with its value.
Keyed = Annotated[T, CacheKey("always")]

# Part of the key unless it has its default: for fields that were added later, so that older results
# stay valid. Of a section, each field that has its default is left out.
KeyedUnlessDefault = Annotated[T, CacheKey("unless default")]

# Part of the key by what it refers to: the content of a source, or the sequences of a step.
KeyedByContent = Annotated[T, CacheKey("by content")]

# Part of the key where evaluations decide when a run ends or which checkpoint is its result.
KeyedIfEvaluated = Annotated[T, CacheKey("if evaluations decide")]

# Not part of the key.
Unkeyed = Annotated[T, CacheKey("never")]


def cache_key(section: type[ConfigSection], name: str) -> CacheKey:
    """The cache-key declaration of a field. Raises KeyError where it has none."""
    declarations = [
        part for part in section.model_fields[name].metadata if isinstance(part, CacheKey)
    ]
    if not declarations:
        raise KeyError(f"{section.__name__}.{name} has no cache-key declaration")
    return declarations[0]


def fields_keyed(section: type[ConfigSection], *roles: Role) -> frozenset[str]:
    """The fields of a section with one of these roles."""
    names = section.model_fields
    return frozenset(name for name in names if cache_key(section, name).role in roles)


def key_defaults(section: type[ConfigSection], prefix: str) -> Iterator[tuple[str, Any]]:
    """Dotted names, beginning with `prefix`, of the fields that are left out of a key at their
    defaults, and these defaults as JSON."""
    for name in section.model_fields:
        if cache_key(section, name).role != "unless default":
            continue
        default = section.model_fields[name].get_default(call_default_factory=True)
        if isinstance(default, ConfigSection):
            for inner, value in default.model_dump(mode="json").items():
                yield f"{prefix}.{name}.{inner}", value
            yield f"{prefix}.{name}", {}
        else:
            yield f"{prefix}.{name}", default
