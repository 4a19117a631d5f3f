"""Row length and number of steps in `penstock plan`, and warnings about probable mistakes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.cli.packed_sources import packed_sources_table
from penstock.config.schema.run import RunConfig
from penstock.estimate.costs.token_counts import Data, DataFacts, Length
from penstock.rows.sizing import Finding, findings, row_length_line, run_size

Known = Literal["counted", "estimated", "not yet"]


@dataclass(frozen=True)
class Sizing:
    """The row length of a run and warnings about its size."""

    known: Known
    """`counted` from packed rows, `estimated` from prepared samples, or `not yet` possible."""
    row_length: int | None
    """Tokens of a row; None if it depends on data that is not prepared yet."""
    findings: tuple[Finding, ...]
    text: str
    sources: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Counts of each source in packed rows, by split; empty for a single one."""

    def as_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "known": self.known,
            "row_length": self.row_length,
            "warnings": [finding.as_json() for finding in self.findings],
            **({"sources": self.sources} if self.sources else {}),
        }


def check_sizing(
    run: RunConfig, facts: DataFacts, data: Data | None, length: Length | None, rows_per_step: int
) -> Sizing:
    """Check the sizes with the data that is prepared and packed. `run` has the row length that
    follows from this data."""
    row = run.data.row_length
    if not (facts.prepared or facts.packed) or data is None or length is None:
        # Without results the row length in `run` is an estimate.
        written_length = run.data.sample_packing_sequence_len
        unknown_figures = "samples that are truncated or dropped, steps" + (
            ", row length" if written_length is None else ""
        )
        return Sizing(
            "not yet",
            written_length,
            (),
            f"    size    not known before data is prepared: {unknown_figures}",
        )
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
    written_length = "counted" if facts.packed else "estimated"
    return Sizing(written_length, row, tuple(warnings), "\n".join(lines), packed.get("sources", {}))
