"""The base class of what a user writes: settings that take no value of a neighbouring type.

Strict, so that neither `"3"` nor `3.0` nor `true` passes for the whole number 3: a slip of the pen
is told instead of being turned into a value.
"""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Frozen, closed; `config/schema/field_docs.py` reads the docstring beneath each field."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        defer_build=True,  # a base class of sections is never validated itself: build what is used
        allow_inf_nan=False,
        protected_namespaces=(),
    )


class ConfigSection(Settings):
    """One mapping of the configuration file."""

    model_config = ConfigDict(strict=True)

    def asks_for(self, name: str) -> bool:
        """Whether the field says something else than its default, which may stand anywhere."""
        field = type(self).model_fields[name]
        return getattr(self, name) != field.get_default(call_default_factory=True)
