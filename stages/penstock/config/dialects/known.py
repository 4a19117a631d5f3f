"""The dialects that are read here, and which of them a file is written in."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from penstock.config.dialects.axolotl import AXOLOTL
from penstock.config.dialects.dialect import Dialect
from penstock.config.dialects.erniekit import ERNIEKIT
from penstock.config.dialects.llama_factory import LLAMA_FACTORY
from penstock.config.dialects.nxdt import NXDT
from penstock.config.dialects.server import SERVER
from penstock.config.dialects.trl import TRL, TRL_DPO
from penstock.core.errors import ConfigError

DIALECTS: tuple[Dialect, ...] = (
    NXDT,
    SERVER,
    AXOLOTL,
    LLAMA_FACTORY,
    TRL_DPO,
    TRL,
    ERNIEKIT,
)
"""Asked in this order whether they recognise a file."""

NATIVE = "native"
"""What `--dialect` calls our own."""


def recognised(values: Mapping[str, Any]) -> Dialect | None:
    """The dialect that a file is written in, as read; None where it is our own, or nobody's."""
    return next((dialect for dialect in DIALECTS if dialect.recognises(values)), None)


def named(name: str) -> Dialect | None:
    """The dialect of this name; None for our own. Raises ConfigError where there is none."""
    if name == NATIVE:
        return None
    found = {dialect.name: dialect for dialect in DIALECTS}
    if name not in found:
        near = get_close_matches(name, found, 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"{name} is no dialect{meant}\n  There are {', '.join([*found, NATIVE])}."
        )
    return found[name]
