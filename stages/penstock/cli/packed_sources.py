"""Table of the sources of packed rows."""

from collections.abc import Mapping
from typing import Any

from penstock.cli.console import table

_HEADING = ("split", "source", "rows", "samples", "tokens", "trained", "fill")


def packed_sources_table(facts: Mapping[str, Any]) -> str:
    """The counts of each source in packed rows, from the facts of the pack stage; empty for a
    single source."""
    rows = [
        (
            split,
            source["label"],
            *(f"{source[name]:,}" for name in ("rows", "samples", "tokens")),
            f"{source['trained_tokens'] / max(1, source['tokens']):.1%}",
            f"{source['fill']:.1%}",
        )
        for split, sources in facts.get("sources", {}).items()
        for source in sources or ()  # 0 in results of earlier versions
    ]
    return table([_HEADING, *rows]) if rows else ""
