"""Timelines as a Chrome trace, for chrome://tracing or Perfetto."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.core.files import write_json
from penstock.estimate.dryrun.fake_cuda import DEFAULT_STREAM
from penstock.estimate.dryrun.summary import RankSummary
from penstock.estimate.dryrun.trace import Collective

MICROSECONDS = 1e6


def write_chrome_trace(ranks: Sequence[RankSummary], file: Path) -> None:
    """Write the timelines of these ranks: one process per rank, one thread per stream."""
    write_json(file, {"traceEvents": [event for rank in ranks for event in _events(rank)]})


def _events(rank: RankSummary) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    named: set[int] = set()
    for span in rank.timeline.spans:
        record, thread = span.record, {"pid": rank.rank, "tid": span.stream}
        if span.stream not in named:
            named.add(span.stream)
            name = "compute" if span.stream == DEFAULT_STREAM else f"stream {span.stream}"
            events.append({"ph": "M", **thread, "name": "thread_name", "args": {"name": name}})
        arguments: dict[str, Any] = {"where": record.call_site}
        if isinstance(record, Collective):
            arguments |= {"bytes": record.num_bytes, "dtype": record.dtype}
            arguments["ranks"] = len(record.ranks)
        events.append(
            {
                "ph": "X",
                **thread,
                "name": record.name,
                "cat": record.phase,
                "ts": span.start * MICROSECONDS,
                "dur": (span.end - span.start) * MICROSECONDS,
                "args": arguments,
            }
        )
    return events
