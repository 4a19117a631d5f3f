"""Fields that name a part: one of ours, or one that an installed package adds."""

from dataclasses import dataclass

from pydantic_core import PydanticCustomError

from penstock.core.errors import ConfigError
from penstock.core.extensions import Registry, UnknownPartError

UNREGISTERED = "unregistered"
"""Type of the error for a name that no part has."""


@dataclass(frozen=True)
class Registered:
    """Validates names of the registry: `Annotated[Literal["adamw", "sgd"] | str, AfterValidator(
    Registered(OPTIMIZERS))]`. The literals are for editors, and are the names of ours."""

    registry: Registry

    def __call__(self, name: str) -> str:
        """The name, with the package of its part imported. Raises ValueError."""
        try:
            if self.registry.find(name):
                self.registry.load(name)
        except UnknownPartError:
            names = {"names": self.registry.names}
            raise PydanticCustomError(UNREGISTERED, "unknown name", names) from None
        except ConfigError as error:
            raise ValueError(one_line(error)) from None
        return name


def one_line(error: ConfigError) -> str:
    """The message without line breaks, as errors of fields are written."""
    return "; ".join(line.strip().rstrip(".") for line in str(error).splitlines())
