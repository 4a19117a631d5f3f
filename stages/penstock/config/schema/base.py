"""The base classes of config sections: strict types, no coercion.

Neither `"3"` nor `3.0` nor `true` is accepted for the integer 3, so that a typo is reported and not
converted into a value.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import AfterValidator, BaseModel, ConfigDict


class Settings(BaseModel):
    """Frozen, no unknown fields; `config/generate_docs.py` reads the docstring under each
    field."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        defer_build=True,  # a base class of sections is never validated itself: build what is used
        allow_inf_nan=False,
        # Settings such as `model_path` begin with `model_`, of which pydantic warns.
        protected_namespaces=(),
    )


class ConfigSection(Settings):
    """One mapping of the config file."""

    model_config = ConfigDict(strict=True)

    def is_non_default(self, name: str) -> bool:
        """Whether the field has another value than its default, whether or not it was written."""
        field = type(self).model_fields[name]
        return getattr(self, name) != field.get_default(call_default_factory=True)


@dataclass(frozen=True)
class FilePath:
    """Declared with the type of a setting that is a path or a URL: `~` and variables in it are
    expanded when a file is read (`loading/expand_paths.py`)."""

    # Whether it is of a folder that a run writes, and so a path whatever is there.
    is_written: bool = False


PATH, FOLDER = FilePath(), FilePath(is_written=True)


def require(holds: Callable[[Any], object], message: str) -> AfterValidator:
    """Declared with the type of a setting: a condition of its values other than null. `{value}` in
    the message of the error is the value."""

    def check(value: Any) -> Any:
        if value is not None and not holds(value):
            raise ValueError(message.format(value=value))
        return value

    return AfterValidator(check)
