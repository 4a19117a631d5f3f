"""Fields that name a part: one of ours, or one that an installed package adds."""

from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from penstock.core.errors import ConfigError
from penstock.core.extensions import Registry, UnknownPartError

# Type of the error for a name that no part has.
UNREGISTERED = "unregistered"


@dataclass(frozen=True)
class Registered:
    """Names of a registry: `Annotated[Literal["adamw", "sgd"] | str, Registered(OPTIMIZERS)]`. The
    literals, which are the names of ours, are for the reference page and for type checkers; the
    JSON Schema has the names of installed packages too."""

    registry: Registry
    # Why names of ours are not written in this field, where they are not.
    not_ours: str = ""

    @property
    def names(self) -> list[str]:
        hidden = self.registry.builtins if self.not_ours else ()
        return [name for name in self.registry.names if name not in hidden]

    def validate(self, name: str) -> str:
        """The name, with the package of its part imported. Raises ValueError."""
        try:
            entry = self.registry.find(name)
            if entry:
                self.registry.load(name)
        except UnknownPartError:
            if not self.names:
                raise ValueError(f"no installed package has a {self.registry.noun}") from None
            # Of a ValueError only the text would reach the message, which suggests a name.
            raise PydanticCustomError(UNREGISTERED, "unknown", {"names": self.names}) from None
        except ConfigError as error:
            lines = (line.strip().rstrip(".") for line in str(error).splitlines())
            raise ValueError("; ".join(lines)) from None
        if self.not_ours and entry is None:
            raise ValueError(self.not_ours.format(name=name))
        return name

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.validate, handler(source))

    def __get_pydantic_json_schema__(self, *_: Any) -> dict[str, Any]:
        # `not: {}` matches nothing: no installed package has such a part.
        return {"enum": self.names, "type": "string"} if self.names else {"not": {}}
