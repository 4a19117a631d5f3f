"""Every field of the config as a mutant: which classes declare it, and what is read instead."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.config.loading.schema_tree import is_section, sections
from penstock.config.schema.base import Settings
from penstock.config.server.config import ServerConfig
from penstock.export.stage import ExportSettings
from penstock.pack.settings import PackSettings
from penstock.prepare.settings import DatasetSettings, MixSettings, PrepareSettings
from penstock.push.stage import PushSettings

INSTEAD: dict[str, Any] = {
    "data.datasets": [],
    "data.datasets[].path": "ignored.jsonl",
    "train.output_dir": "ignored",
    "server.model_path": "builtin:ignored",
    "PrepareSettings.datasets": (),
}
"""What is read where a field has no default, or where tests write the default alone."""

OF_STAGES = (
    *(PrepareSettings, DatasetSettings, MixSettings, PackSettings, ExportSettings, PushSettings),
)
"""What stages read in place of the config. Their tests make it themselves: that a field arrives
there and that it does something there are two mutants."""


@dataclass(frozen=True)
class Field:
    """A field of the config, as `train.lr` or, of a training server, `server.model_path`; or of
    what a stage reads, as `PackSettings.seed`."""

    name: str
    owner: str
    """The class that declares it."""

    def mutant(self, *, validation: bool) -> dict[str, Any]:
        """What `startup/sitecustomize.py` reads; `validation` ignores the field as well."""
        made = {
            "classes": [self.owner],
            "name": self.name.rpartition(".")[2],
            "validation": validation,
            "identity": self.owner not in {one.__name__ for one in OF_STAGES},
        }
        return {**made, "value": INSTEAD[self.name]} if self.name in INSTEAD else made


def all_fields() -> dict[str, Field]:
    """Every leaf field of a run's and of a server's config, and of what stages read, by name."""
    stages = {one.__name__: one for one in OF_STAGES}
    places = {**sections(), "server": ServerConfig, **stages}
    return {
        field.name: field for place, section in places.items() for field in _fields(place, section)
    }


def _fields(place: str, section: type[Settings]) -> Iterator[Field]:
    for name, field in section.model_fields.items():
        if not is_section(field.annotation):
            owner = next(one for one in section.__mro__ if name in one.__annotations__)
            yield Field(f"{place}.{name}", owner.__name__)
