"""The one base class of all settings: frozen, closed, and documented where they are declared."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Frozen, refuses unknown fields, takes each field's help from the docstring beneath it."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )
