"""Every field of the config as a mutant: which classes declare it, and what is read instead."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.config.loading.schema_tree import is_section, sections
from penstock.config.schema.base import Settings
from penstock.config.server.config import ServerConfig

INSTEAD: dict[str, Any] = {
    "data.datasets": [],
    "data.datasets[].path": "ignored.jsonl",
    "train.output_dir": "ignored",
    "server.model_path": "builtin:ignored",
}
"""What is read where a field has no default, or where tests write the default alone."""


@dataclass(frozen=True)
class Field:
    """A field of the config, as `train.lr` or, of a training server, `server.model_path`."""

    name: str
    owner: str
    """The class that declares it."""

    def mutant(self, *, validation: bool) -> dict[str, Any]:
        """What `startup/sitecustomize.py` reads; `validation` ignores the field as well."""
        made = {
            "classes": [self.owner],
            "name": self.name.rpartition(".")[2],
            "validation": validation,
        }
        return {**made, "value": INSTEAD[self.name]} if self.name in INSTEAD else made


def all_fields() -> dict[str, Field]:
    """Every leaf field of a run's and of a server's config, by its name."""
    places = {**sections(), "server": ServerConfig}
    return {
        field.name: field for place, section in places.items() for field in _fields(place, section)
    }


def _fields(place: str, section: type[Settings]) -> Iterator[Field]:
    for name, field in section.model_fields.items():
        if not is_section(field.annotation):
            owner = next(one for one in section.__mro__ if name in one.__annotations__)
            yield Field(f"{place}.{name}", owner.__name__)
