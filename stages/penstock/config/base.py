"""The one base class of all settings: frozen, closed, and documented where they are declared."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Frozen, closed; `config/docstrings.py` reads the docstring beneath each field."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        defer_build=True,  # a base class of sections is never validated itself: build what is used
        allow_inf_nan=False,
        protected_namespaces=(),
    )
