"""Row length and number of steps in `penstock plan`, and warnings about probable mistakes."""

from collections.abc import Mapping
from typing import Any

from penstock.cli.packed_sources import packed_sources_table
from penstock.config.schema.run import RunConfig
from penstock.estimate.costs.token_counts import Data, DataFacts, Length
from penstock.rows.sizing import findings, row_length_line, run_size


def check_sizing(
    run: RunConfig, facts: DataFacts, data: Data | None, length: Length | None, rows_per_step: int
) -> tuple[str, dict[str, Any]]:
    """The row length and warnings about sizes, as lines and as plain values: counted from packed
    rows, or estimated from prepared samples. `run` has the row length that follows from `data`."""
    row = run.data.row_length
    if not (facts.prepared or facts.packed) or data is None or length is None:
        # Without results the row length in `run` is an estimate.
        written_length = run.data.sample_packing_sequence_len
        unknown_figures = "samples that are truncated or dropped, steps" + (
            ", row length" if written_length is None else ""
        )
        text = f"    size    not known before data is prepared: {unknown_figures}"
        return text, {"known": "not yet", "row_length": written_length, "warnings": []}
    packed: Mapping[str, Any] = facts.packed or {
        "lengths": (facts.prepared or {})["lengths"],
        "epoch_rows": {"train": list(data.epoch_rows)},
        "row_length": {"train": row},
    }
    warnings = findings(
        run_size(
            run,
            packed=packed,
            prepared=facts.prepared,
            steps=length.steps,
            set_by=length.set_by,
            rows_per_step=rows_per_step,
        )
    )
    doubt = "" if facts.packed else " (estimated: nothing is packed yet)"
    lines = [f"    size    {line}" for line in [row_length_line(run, row)] if line]
    lines += [f"    warning {finding.text}{doubt}" for finding in warnings]
    lines = lines or [f"    size    rows of {row:,} tokens; no warnings"]
    sources = packed_sources_table(packed)
    lines += [f"    packed  {line}" for line in sources.splitlines()]
    values = {
        "known": "counted" if facts.packed else "estimated",
        "row_length": row,
        "warnings": [finding.as_json() for finding in warnings],
        # Of several sources, their counts in packed rows.
        **({"sources": packed["sources"]} if packed.get("sources") else {}),
    }
    return "\n".join(lines), values
