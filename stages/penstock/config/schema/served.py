"""Fields of a run that a training server has too, declared with their types.

`Annotated[Keyed[int], Served(default=32)]` is a setting at the top of a server's file, where its
default is another.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import Field, create_model
from pydantic.fields import FieldInfo

from penstock.config.schema.base import ConfigSection

Section = TypeVar("Section", bound=ConfigSection)

# Not None, which is the default of many fields.
AS_IN_A_RUN = object()


@dataclass(frozen=True)
class Served:
    """The field is a setting of a training server."""

    # What a server uses unless it is written.
    default: Any = AS_IN_A_RUN
    # The default as documented. If it is not written, a server uses what fits the machine.
    documented: Any = AS_IN_A_RUN
    # Its name in a server's file, if it is another.
    name: str = ""
    # Its description, if it is another.
    doc: str = ""


class ServedField(NamedTuple):
    """A field of a run in a server's file."""

    name: str
    run_name: str
    served: Served
    field: FieldInfo


def served_fields(**sections: type[ConfigSection]) -> Iterator[ServedField]:
    """The fields of these sections that a server has too."""
    for section_name, section in sections.items():
        for name, field in section.model_fields.items():
            for served in field.metadata:
                if isinstance(served, Served):
                    yield ServedField(served.name or name, f"{section_name}.{name}", served, field)


def with_served(**sections: type[ConfigSection]) -> Callable[[type[Section]], type[Section]]:
    """Adds these sections' `Served` fields to the class of a server's settings."""

    def extend(server: type[Section]) -> type[Section]:
        definitions: dict[str, Any] = {}
        for name, _, served, field in served_fields(**sections):
            default = served.documented if served.default is AS_IN_A_RUN else served.default
            if default is AS_IN_A_RUN:
                default = field.get_default(call_default_factory=True)
            annotation = Annotated[field.annotation, *field.metadata]  # pyright: ignore[reportInvalidTypeForm]
            definitions[name] = (annotation, Field(default, description=served.doc or None))
        # Pydantic collects the fields of a class when it is created: later ones need a subclass.
        return create_model(
            server.__name__,
            __base__=server,
            __module__=server.__module__,
            __doc__=server.__doc__,
            **definitions,
        )

    return extend
