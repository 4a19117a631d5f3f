"""What flows are given, typed so that the form in Prefect's UI and its server refuse the rest."""

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
from penstock.plan import StageName

FIELD_NAME = r"^[A-Za-z_]\w*(\.[\w-]+)+$"
"""Names of settings, as they are written behind dashes on the command line."""

CREDENTIAL = (
    r"://[^/?#\s]*:[^/?#\s]*@"
    r"|[?&][^=&\s]*([Ss]ig|[Tt]oken|[Kk]ey|[Ss]ecret|[Pp]assword|[Cc]redential)[^=&\s]*="
    r"|(^|[^A-Za-z0-9])hf_[A-Za-z0-9]{20}"
)
"""A password in a URL, a signature, a token of the hub: Prefect shows parameters to everyone."""

CREDENTIALS_NAME = r"(TOKEN|API_KEY|ACCESS_KEY|SECRET|PASSWORD)(_ID)?$"
"""How variables are called that hold one."""

MAX_TITLE_CHARS = 100
"""Characters of a run's name, at most."""


@dataclass(frozen=True)
class Description:
    """What the form says under a parameter: Prefect reads no description of pydantic's there."""

    text: str

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """The parameter's schema with the text in it."""
        return {**handler(core), "description": self.text}


def _value_schema(depth: int) -> dict[str, Any]:
    """The schema of a value without credentials, as deep as settings are."""
    schema: dict[str, Any] = {"not": {"type": "string", "pattern": CREDENTIAL}}
    if depth:
        below = _value_schema(depth - 1)
        names = {"not": {"pattern": CREDENTIALS_NAME}}
        schema |= {"items": below, "additionalProperties": below, "propertyNames": names}
    return schema


ConfigFile = Annotated[
    Path, Description("A YAML file, as seen from the folder that the deployment works in.")
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
        'Settings laid over the file, by dotted name, such as {"train.lr": 2e-5}. Any JSON; a text '
        "is read as on the command line."
    ),
]
Forced = Annotated[
    Annotated[list[StageName], Field(json_schema_extra={"uniqueItems": True})] | None,
    Description("Stages to build again even if they are there."),
]


def load_run(config: Path, overrides: Mapping[str, JsonValue] | None) -> RunConfig:
    """The run that the file and the overrides describe. Raises ConfigError with all faults."""
    return load_config(
        config, [Override(name, format_value(v)) for name, v in (overrides or {}).items()]
    )


def parse_argv(words: list[str], script: str) -> tuple[Path, dict[str, JsonValue]]:
    """Config and overrides as somebody typed them behind a script's name."""
    rest, written = split_overrides(words)
    if len(rest) != 1 or rest[0].startswith("-"):
        raise ConfigError(
            f"{len(rest)} words that are no settings: {' '.join(rest) or 'none'}.\n"
            f"  Name one config file: python flows/{script} CONFIG [--section.field value]."
        )
    for each in written:
        if re.search(CREDENTIAL, each.text) or re.search(CREDENTIALS_NAME, each.name):
            raise ConfigError(
                f"{each.option} holds a credential, and Prefect keeps parameters and shows them to "
                "everyone who may see its pages.\n  Set credentials in the environment (HF_TOKEN, "
                "AWS_SECRET_ACCESS_KEY), and write a signed URL in the config file."
            )
    return Path(rest[0]), {each.name: each.text for each in written}


def format_value(value: JsonValue) -> str:
    """A value as somebody would type it on the command line."""
    return value if isinstance(value, str) else format_as_yaml(value)


def build_run_title(run: RunConfig, overrides: Mapping[str, JsonValue] | None) -> str:
    """What is running: the run's name and what was laid over its file, without what is secret."""
    told = [f"{name}={format_value(value)}" for name, value in (overrides or {}).items()]
    title = redact_text(": ".join([run.pipeline.name, *([", ".join(told)] if told else [])]))
    return title if len(title) <= MAX_TITLE_CHARS else f"{title[: MAX_TITLE_CHARS - 1]}…"
