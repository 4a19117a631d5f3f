"""Sections of a report beside its charts: data, evaluation by generation, and lineage."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.config.schema.run import RunConfig
from penstock.core.cache.stage import short
from penstock.core.remote.urls import redact_text
from penstock.train.length_histogram import bar_names
from penstock.train.report.chart import BarChart, build_bar_chart
from penstock.train.report.format import amount, duration, number, share, when
from penstock.train.report.read_run import RunRecord

Row = tuple[str, ...]

SPLITS = {"train": "training", "validation": "validation"}


@dataclass(frozen=True)
class DataSection:
    """The content of the section, as text."""

    figures: list[tuple[str, str]]
    lengths: list[BarChart]
    sources: list[Row]
    """The first row is the heading; empty if the sources are unknown."""
    packed: list[Row]
    """The sources of packed rows, likewise; empty for a single source."""
    dropped: list[tuple[str, str]]
    """Reasons and counts, most frequent first."""
    examples: list[tuple[str, str]]
    """Locations and messages of some dropped samples."""
    samples: list[list[Mapping[str, Any]]]
    """Decoded samples with their loss mask."""


def build_data_section(
    facts: Mapping[str, Any] | None, shown: Mapping[str, Any], config: RunConfig
) -> DataSection | None:
    """Build the section from the run's stored facts and samples; None without facts."""
    if facts is None:
        return None
    packed, prepared = facts["packed"], facts["prepared"] or {}
    dropped: Mapping[str, int] = prepared.get("dropped", {})
    return DataSection(
        figures=list(_data_figures(packed, prepared, config)),
        lengths=list(_lengths(packed, prepared, shown["lengths"])),
        sources=_sources(prepared.get("sources", [])),
        packed=_packed_sources(packed.get("sources", {})),
        dropped=[
            (reason.replace("_", " "), f"{count:,}")
            for reason, count in sorted(dropped.items(), key=lambda item: -item[1])
        ],
        examples=[_dropped_sample(item) for item in prepared.get("dropped_samples", [])],
        samples=shown["samples"],
    )


def _data_figures(
    packed: Mapping[str, Any], prepared: Mapping[str, Any], config: RunConfig
) -> Iterator[tuple[str, str]]:
    rows: Mapping[str, int] = prepared.get("rows", {})
    for split, name in SPLITS.items():
        if rows.get(split):
            tokens, trained = (prepared[n][split] for n in ("tokens", "trained_tokens"))
            yield f"{name} samples", f"{rows[split]:,}"
            yield f"{name} tokens", f"{amount(tokens)}, {trained / tokens:.1%} trained on"
    if prepared.get("mix_strategy", "concat") != "concat":
        drawn = f"{prepared['samples_per_epoch']:,} ({prepared['mix_strategy']})"
        yield "samples per epoch", drawn
    if prepared.get("truncated"):
        cut = f"{prepared['truncated']:,} ({amount(prepared['tokens_cut'])} tokens)"
        yield "truncated samples", cut
    for split, name in SPLITS.items():
        if packed["rows"][split]:
            length = config.data.row_length
            capacity = packed.get("row_length", {}).get(split, length)
            yield f"{name} rows of {capacity:,} tokens", f"{packed['rows'][split]:,}"
            yield "packing efficiency", f"{packed['fill'][split]:.1%}"


def _lengths(
    packed: Mapping[str, Any], prepared: Mapping[str, Any], shown: Mapping[str, Any]
) -> Iterator[BarChart]:
    """The length histogram of each split, from the run's stored samples; else from the stages'
    facts, by powers of two."""
    coarse = prepared.get("lengths", packed["lengths"])
    for split, name in SPLITS.items():
        title = f"Tokens of {name} samples"
        if histogram := shown.get(split):
            edges, counts = histogram["edges"], histogram["counts"]
            shorts = [f"{edge:,}" for edge in edges]
            bars = list(zip(shorts, bar_names(edges), counts, strict=False))
            yield build_bar_chart(title, bars, note=_percentiles(histogram["percentiles"]))
        elif coarse[split]:
            yield build_bar_chart(title, _power_of_two_bars(coarse[split]))


def _percentiles(percentiles: Mapping[str, int]) -> str:
    rows = {name: f"{length:,}" for name, length in percentiles.items()}
    return (
        f"Shortest {rows['shortest']}, median {rows['median']}, 90% up to {rows['90%']}, "
        f"99% up to {rows['99%']}, longest {rows['longest']}."
    )


def _power_of_two_bars(histogram: Mapping[str, int]) -> list[tuple[str, str, int]]:
    """(range, range, samples) of every power of two from the shortest to the longest."""
    uppers = sorted(map(int, histogram))
    upper, bars = uppers[0], list[tuple[str, str, int]]()
    while upper <= uppers[-1]:
        name = f"{upper // 2 + 1:,} - {upper:,}" if upper > 2 else str(upper)
        bars.append((name, name, histogram.get(str(upper), 0)))
        upper *= 2
    return bars


def _sources(sources: Sequence[Mapping[str, Any]]) -> list[Row]:
    rows = [source for source in sources if source["role"] in SPLITS]
    if not rows:
        return []
    heading = ("source", "used for", "samples", "tokens", "trained on", "share of epoch", "repeats")
    return [heading, *map(_source, rows)]


def _packed_sources(sources: Mapping[str, Any]) -> list[Row]:
    rows = [
        (
            redact_text(source["label"]),
            SPLITS[split],
            *(amount(source[name]) for name in ("rows", "samples", "tokens", "trained_tokens")),
            f"{source['fill']:.1%}",
        )
        for split, of_split in sources.items()
        for source in of_split or ()  # 0 in results of earlier versions
    ]
    names = ("packed source", "used for", "rows", "samples", "tokens", "trained tokens", "fill")
    return [names, *rows] if rows else []


def _source(source: Mapping[str, Any]) -> Row:
    trained = f"{source['trained_tokens'] / source['tokens']:.1%}" if source["tokens"] else "-"
    is_drawn = source["role"] == "train" and source["samples"]
    return (
        redact_text(source["label"]),
        SPLITS[source["role"]],
        f"{source['samples']:,}",
        amount(source["tokens"]),
        trained,
        f"{source['share']:.1%}" if is_drawn else "-",
        f"{source['drawn'] / source['samples']:.2f}x" if is_drawn else "-",
    )


def _dropped_sample(sample: Mapping[str, Any]) -> tuple[str, str]:
    if "file" in sample:
        numbered = f", record {sample['record']}" if "record" in sample else f":{sample['line']}"
        location = f"{sample['file']}{numbered}"
    else:
        location = f"{sample['source']}, record {sample['row']} of slice {sample['slice']}"
    return redact_text(location), redact_text(sample["why"])


@dataclass(frozen=True)
class EvaluationSection:
    """The content of the section; empty if only the command is shown."""

    figures: list[tuple[str, str]]
    """Metrics of held-out prompts."""
    answers: list[Mapping[str, Any]]
    """Sample completions: `prompt`, `answer`, `expected` and whether that is `right`."""
    tasks: list[Row]
    """Harness task scores; the first row is the heading."""
    command: str
    """The command that runs an evaluation, if there has been none."""


def build_evaluation_section(run: RunRecord) -> EvaluationSection | None:
    """None if there was no evaluation and none is possible."""
    held_out, tasks = run.eval_results["held_out"], run.eval_results["tasks"]
    can_be_asked = run.state == "finished" and run.holds_out and not run.config.train.eval_only
    if not held_out and not tasks and not can_be_asked:
        return None
    return EvaluationSection(
        figures=_held_out_figures(held_out) if held_out else [],
        answers=held_out["samples"] if held_out else [],
        tasks=[("task", "metric", "value", "standard error"), *map(_task, tasks)] if tasks else [],
        command="" if held_out or not can_be_asked else f"penstock eval {run.folder}",
    )


def _held_out_figures(held_out: Mapping[str, Any]) -> list[tuple[str, str]]:
    right, count, part = held_out["right"], held_out["asked"], held_out["accuracy"]
    error = math.sqrt(part * (1 - part) / count)
    pattern = held_out["pattern"]
    return [
        ("exact match", f"{right:,} of {count:,}, {share(part)}"),
        ("standard error", share(error)),
        ("compared", f"the last match of {pattern}" if pattern else "the whole completion"),
        ("evaluated", when(held_out["time"])),
    ]


def _task(score: Mapping[str, Any]) -> Row:
    error = "" if score["stderr"] is None else number(score["stderr"])
    limit = "" if score["limit"] is None else f" (first {score['limit']:,})"
    return f"{score['task']}{limit}", score["metric"], number(score["value"]), error


@dataclass(frozen=True)
class Link:
    """One stage of the lineage."""

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
            pins = [_pinned_source(name, pin) for name, pin in sources.items()]
            links.append(Link("sources", "", "", pins))
        if "prepare" in artifacts:
            links.append(_link(run, run.data, "prepare", "prepared", "sample"))
        if "pack" in artifacts:
            links.append(_link(run, run.data, "pack", "packed", "row"))
    facts = [f"{run.steps[-1]['step']:,} step(s)"] if run.steps else []
    if started := run.environment.get("started"):
        facts.append(when(started))
    if run.seconds is not None:
        facts.append(f"in {duration(run.seconds)}")
    return [*links, Link("train", short(run.key), run.state, facts)]


def _link(run: RunRecord, data: Mapping[str, Any], stage: str, name: str, unit: str) -> Link:
    """`name` is what `data` calls the facts of the stage."""
    facts, state = data[name] or {}, ""
    rows, fill = facts.get("rows", {}), facts.get("fill", {})
    lines = [f"{sum(rows.values()):,} {unit}(s)"] if rows else []
    if "train" in fill:
        lines.append(f"{share(fill['train'])} full")
    if build := run.build_info.get(stage):
        state = "reused" if build["reused"] else "built for this run"
        lines.append(f"{when(build['created'])}, in {duration(build['seconds'])}")
    return Link(stage, short(data["made"][stage]["key"]), state, lines)


def _pinned_source(name: str, pin: Mapping[str, Any]) -> str:
    """The name and pinned content of a source, in brief."""
    title = next((str(pin[n]) for n in ("repo", "label", "name") if pin.get(n)), name)
    version = next((f"{n} {str(pin[n])[:12]}" for n in ("commit", "version") if pin.get(n)), "")
    files = f"{pin['files']} file(s)" if isinstance(pin.get("files"), int) else ""
    details = ", ".join(part for part in (version, files) if part)
    return redact_text(f"{title} ({details})" if details else title)
