"""Lineage of a run: the preceding stages, their artifacts, and whether they were reused."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.core.cache.stage import short
from penstock.core.remote.urls import redact_text
from penstock.train.report.format import duration, share, when
from penstock.train.report.read_run import RunRecord


@dataclass(frozen=True)
class Link:
    """One stage."""

    stage: str
    key: str
    state: str
    """For example `reused` or `built for this run`."""
    facts: list[str]


def build_lineage(run: RunRecord) -> list[Link]:
    """From the sources to the run itself; only the run if nothing else is known."""
    links: list[Link] = []
    if run.data:
        artifacts: Mapping[str, Any] = run.data.get("made", {})
        if sources := artifacts.get("prepare", {}).get("sources"):
            links.append(Link("sources", "", "", [_source(n, pin) for n, pin in sources.items()]))
        if "prepare" in artifacts:
            links.append(
                _link("prepare", artifacts, run.build_info, _prepared(run.data["prepared"] or {}))
            )
        if "pack" in artifacts:
            links.append(_link("pack", artifacts, run.build_info, _packed(run.data["packed"])))
    return [*links, _train(run)]


def _link(
    stage: str, artifacts: Mapping[str, Any], making: Mapping[str, Any], facts: list[str]
) -> Link:
    state = ""
    if build := making.get(stage):
        state = "reused" if build["reused"] else "built for this run"
        facts = [*facts, f"{when(build['created'])}, in {duration(build['seconds'])}"]
    return Link(stage, short(artifacts[stage]["key"]), state, facts)


def _train(run: RunRecord) -> Link:
    facts = [f"{run.steps[-1]['step']:,} step(s)"] if run.steps else []
    if started := run.environment.get("started"):
        facts.append(when(started))
    if run.seconds is not None:
        facts.append(f"in {duration(run.seconds)}")
    return Link("train", short(run.key), run.state, facts)


def _prepared(facts: Mapping[str, Any]) -> list[str]:
    rows = facts.get("rows", {})
    return [f"{sum(rows.values()):,} sample(s)"] if rows else []


def _packed(facts: Mapping[str, Any]) -> list[str]:
    rows, fill = facts.get("rows", {}), facts.get("fill", {})
    facts_shown = [f"{sum(rows.values()):,} row(s)"] if rows else []
    if "train" in fill:
        facts_shown.append(f"{share(fill['train'])} full")
    return facts_shown


def _source(name: str, pin: Mapping[str, Any]) -> str:
    """The name and pinned content of a source, in brief."""
    called = next((str(pin[n]) for n in ("repo", "label", "name") if pin.get(n)), name)
    mark = next((f"{n} {str(pin[n])[:12]}" for n in ("commit", "version") if pin.get(n)), "")
    files = f"{pin['files']} file(s)" if isinstance(pin.get("files"), int) else ""
    details = ", ".join(part for part in (mark, files) if part)
    return redact_text(f"{called} ({details})" if details else called)
