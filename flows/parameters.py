"""The parameters of flows, with types by which Prefect's UI and server validate them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, GetJsonSchemaHandler, JsonValue
from pydantic_core import CoreSchema

from penstock.api.load_config import load_config
from penstock.api.overrides import format_value as format_as_yaml
from penstock.config.loading.cli_overrides import Override, split_overrides
from penstock.config.schema.run import RunConfig
from penstock.core.errors import ConfigError
from penstock.core.remote.urls import redact_text
from penstock.pipeline.plan import StageName

FIELD_NAME = r"^[A-Za-z_]\w*(\.[\w-]+)+$"
"""Dotted names of config fields."""

CREDENTIAL = (
    r"://[^/?#\s]*:[^/?#\s]*@"
    r"|[?&][^=&\s]*([Ss]ig|[Tt]oken|[Kk]ey|[Ss]ecret|[Pp]assword|[Cc]redential)[^=&\s]*="
    r"|(^|[^A-Za-z0-9])hf_[A-Za-z0-9]{20}"
)
"""A password or signature in a URL, or a hub token: Prefect shows parameters to every user."""

CREDENTIALS_NAME = r"(TOKEN|API_KEY|ACCESS_KEY|SECRET|PASSWORD)(_ID)?$"
"""Names of variables that hold credentials."""

MAX_TITLE_CHARS = 100
"""Maximum length of a run's title."""


@dataclass(frozen=True)
class Description:
    """The description of a parameter in the form: Prefect ignores pydantic's description there."""

    text: str

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """The parameter's schema with the text in it."""
        return {**handler(core), "description": self.text}


def _value_schema(depth: int) -> dict[str, Any]:
    """The JSON Schema of a value without credentials, nested as deep as settings are."""
    schema: dict[str, Any] = {"not": {"type": "string", "pattern": CREDENTIAL}}
    if depth:
        below = _value_schema(depth - 1)
        names = {"not": {"pattern": CREDENTIALS_NAME}}
        schema |= {"items": below, "additionalProperties": below, "propertyNames": names}
    return schema


ConfigFile = Annotated[
    Path, Description("A YAML file, relative to the working directory of the deployment.")
]
Overrides = Annotated[
    Annotated[
        dict[str, JsonValue],
        Field(
            json_schema_extra={
                "propertyNames": {"pattern": FIELD_NAME, "not": {"pattern": CREDENTIALS_NAME}},
                "additionalProperties": _value_schema(3),
            }
        ),
    ]
    | None,
    Description(
        'Overrides by dotted name, such as {"train.lr": 2e-5}. Values are JSON; strings are parsed '
        "as on the command line."
    ),
]
Forced = Annotated[
    Annotated[list[StageName], Field(json_schema_extra={"uniqueItems": True})] | None,
    Description("Stages to build again even if they are cached."),
]


def load_run(config: Path, overrides: Mapping[str, JsonValue] | None) -> RunConfig:
    """Load the config with the overrides. Raises ConfigError with all faults."""
    return load_config(
        config, [Override(name, format_value(v)) for name, v in (overrides or {}).items()]
    )


def parse_argv(arguments: list[str], script: str) -> tuple[Path, dict[str, JsonValue]]:
    """Parse a script's arguments: the config and overrides."""
    positional, written = split_overrides(arguments)
    if len(positional) != 1 or positional[0].startswith("-"):
        raise ConfigError(
            f"{len(positional)} words that are no settings: {' '.join(positional) or 'none'}.\n"
            f"  Name one config file: python flows/{script} CONFIG [--section.field value]."
        )
    for override in written:
        # `search`, as JSON Schema's `pattern` is not anchored either.
        if re.search(CREDENTIAL, override.text) or re.search(CREDENTIALS_NAME, override.name):
            raise ConfigError(
                f"{override.option} holds a credential, and Prefect stores parameters and shows "
                "them to every user of its UI.\n  Set credentials in the environment (HF_TOKEN, "
                "AWS_SECRET_ACCESS_KEY), and write a signed URL in the config file."
            )
    return Path(positional[0]), {override.name: override.text for override in written}


def format_value(value: JsonValue) -> str:
    """A value as on the command line."""
    return value if isinstance(value, str) else format_as_yaml(value)


def build_run_title(run: RunConfig, overrides: Mapping[str, JsonValue] | None) -> str:
    """The run's name and its overrides, without credentials."""
    settings = ", ".join(f"{name}={format_value(v)}" for name, v in (overrides or {}).items())
    title = redact_text(f"{run.pipeline.name}: {settings}" if settings else run.pipeline.name)
    return title if len(title) <= MAX_TITLE_CHARS else f"{title[: MAX_TITLE_CHARS - 1]}…"
