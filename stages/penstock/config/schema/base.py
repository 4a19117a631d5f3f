"""The base classes of config sections: strict types, no coercion.

Neither `"3"` nor `3.0` nor `true` is accepted for the integer 3, so that a typo is reported and not
converted into a value.
"""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Frozen, no unknown fields; `config/generate_docs.py` reads the docstring under each
    field."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        defer_build=True,  # a base class of sections is never validated itself: build what is used
        allow_inf_nan=False,
        protected_namespaces=(),
    )


class ConfigSection(Settings):
    """One mapping of the config file."""

    model_config = ConfigDict(strict=True)

    def is_non_default(self, name: str) -> bool:
        """Whether the field has another value than its default, whether or not it was written."""
        field = type(self).model_fields[name]
        return getattr(self, name) != field.get_default(call_default_factory=True)
