"""The costs of a run in `penstock plan`: memory, time, tokens, disk, and faster layouts."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from penstock.cli.console import table
from penstock.cli.inspect_commands import PlanOptions
from penstock.cli.plan.sizing import check_sizing
from penstock.config.schema.run import RunConfig
from penstock.core.cache.store import PlannedStage, find_cached
from penstock.core.errors import ConfigError
from penstock.engine.distributed.parallel_dims import ParallelDims, compute_dims, rows_per_step
from penstock.engine.distributed.validate_layout import ModelDims
from penstock.estimate.costs.chosen_settings import ChosenSettings, choose_settings
from penstock.estimate.costs.device_speed import detect_machine, find_machine
from penstock.estimate.costs.estimate import Prediction, build_cost_model, predict, with_images
from penstock.estimate.costs.find_layouts import LayoutSearch, Proposal, find_fastest_layouts
from penstock.estimate.costs.token_counts import DataFacts, estimate_data, with_row_length
from penstock.estimate.machine import resolve_hf_config, world_size
from penstock.train.launch.torchrun import num_local_ranks

NOT_MEASURED = "time not known; penstock doctor --measure measures how fast this machine is"


def costs(
    run: RunConfig, steps: Sequence[PlannedStage], options: PlanOptions
) -> tuple[str, dict[str, Any]]:
    """The costs of a run as text and as plain values; empty for a run that does not train.

    Raises ConfigError for unknown devices.
    """
    if all(step.stage.name != "train" for step in steps):
        if options.devices or options.device_kind:
            raise ConfigError(
                "--devices and --device-kind are about training, and this run does not train.\n"
                "  Add train to pipeline.stages, or leave them out."
            )
        return "", {}
    degrees = compute_dims(run.train, world_size(run))
    if not isinstance(degrees, ParallelDims):
        return "", {}
    hf_config, facts = resolve_hf_config(run), DataFacts.read(steps)
    model = build_cost_model(run, hf_config)
    run = with_row_length(run, facts, steps, model.config.vocab_size)
    machine = (
        find_machine(options.device_kind)
        if options.device_kind
        else detect_machine(num_local_ranks(run))
    )
    # A search for layouts tries these settings itself.
    searches = options.devices is not None
    chosen = ChosenSettings(run) if searches else choose_settings(run, machine)
    run = chosen.run
    data = estimate_data(run, steps, model.config.vocab_size)
    model = with_images(model, run, hf_config, data)
    prediction = predict(run, model, degrees, machine, data)
    # Cached log-probs cost nothing.
    if any(step.stage.name == "reference" and find_cached(step) for step in steps):
        prediction = replace(prediction, reference_seconds=None, unread_rows=None)
    sizes = sum(map(math.prod, model.shapes.values()))
    sizes += sum(params for params, _ in model.vision.parts) if model.vision else 0
    sizing, sizing_values = check_sizing(
        run, facts, data, prediction.length, prediction.rows_per_step
    )
    text = f"{_format_costs(prediction, sizes)}\n{sizing}"
    text += f"\n    layout  {chosen.note}" if chosen.note else ""
    plain: dict[str, Any] = {"costs": _costs_as_json(prediction, sizes), "sizing": sizing_values}
    if options.devices is None:
        return text, plain
    counts, rows = ModelDims.of(hf_config), rows_per_step(run.train, degrees.num_replicas)
    search = LayoutSearch(run, model, counts, machine, options.devices, rows, data)
    layouts = find_fastest_layouts(search)
    text += "\n" + _format_layouts(layouts, search)
    return text, {**plain, "layouts": [_layout_as_json(layout) for layout in layouts]}


def _format_costs(prediction: Prediction, sizes: int) -> str:
    machine = prediction.machine
    source = f" ({machine.source})" if machine.source else ""
    reference = f"{format_seconds(prediction.reference_seconds)} for the reference log-probs"
    return "\n".join(
        [
            f"costs on {format_ranks(prediction.degrees)} of {machine.name}{source}",
            f"    model   {_format_count(sizes)} parameters",
            f"    run     {_format_length(prediction)}",
            f"    step    {_format_step(prediction)}",
            *(
                [f"    before  {reference} of all completions, once"]
                if prediction.reference_seconds
                else []
            ),
            *([f"    warning {prediction.unread_rows}"] if prediction.unread_rows else []),
            f"    memory  {_format_memory(prediction)}",
            f"    disk    {_format_disk(prediction)}",
        ]
    )


def format_ranks(degrees: ParallelDims) -> str:
    """The number of processes, and the sizes of the parallel axes."""
    if degrees.world_size == 1:
        return "1 process"
    return f"{degrees.world_size} processes ({degrees})"


def _format_length(prediction: Prediction) -> str:
    rows = f"{prediction.rows_per_step} row{'s' if prediction.rows_per_step > 1 else ''}"
    if prediction.length is None:
        return f"steps of {rows}; how many is known once data is prepared"
    length = prediction.length
    about = "about " if length.certain == "estimated" else ""
    span = f" ({length.least:,} to {length.most:,})" if length.least < length.most else ""
    return (
        f"{about}{length.steps:,} steps{span} of {rows},"
        f" {about}{_format_count(length.tokens)} tokens ({length.certain}; {length.set_by})"
    )


def _format_step(prediction: Prediction) -> str:
    if prediction.step is None:
        return NOT_MEASURED
    seconds = prediction.step.total
    parts = ", ".join(
        f"{name} {100 * value / seconds:.0f} %" for name, value in asdict(prediction.step).items()
    )
    speed = f"{prediction.tokens_per_step / seconds:,.0f} tokens/s"
    total = (
        f"; all steps {format_seconds(prediction.seconds)}"
        if prediction.seconds is not None
        else ""
    )
    return f"{format_seconds(seconds)}, {speed}{total} ({parts})"


def _format_memory(prediction: Prediction) -> str:
    parts = ", ".join(
        f"{name} {format_bytes(value)}" for name, value in asdict(prediction.memory).items()
    )
    limit = prediction.machine.memory
    capacity = "" if limit is None else f" of {format_bytes(limit)}"
    doubt = "; it does not fit" if prediction.fits is False else ""
    return f"{format_bytes(prediction.memory.total)}{capacity} for a process{doubt} ({parts})"


def _format_disk(prediction: Prediction) -> str:
    disk = prediction.disk
    times = f"{disk.checkpoints} x " if disk.checkpoints else ""
    parts = [
        f"checkpoints {times}{format_bytes(disk.checkpoint)}",
        f"exported {format_bytes(disk.exported)}",
    ]
    for name in ("prepared", "packed"):
        size = getattr(disk, name)
        parts += [f"{name} {format_bytes(size)}"] if size is not None else []
    return ", ".join(parts)


def _format_layouts(layouts: Sequence[Proposal], search: LayoutSearch) -> str:
    head = f"fastest on {search.devices} x {search.machine.name}, {search.rows} rows a step:"
    if not layouts:
        return f"{head} none that fits was found; more devices or smaller rows are needed"
    rows = [("step", "tokens/s", "memory", "settings of train")]
    for layout in layouts:
        prediction, speed = layout.prediction, _per_second(layout.prediction)
        rows.append(
            (
                format_seconds(prediction.step.total if prediction.step else None),
                f"{speed:,.0f}" if speed else "n/a",
                format_bytes(prediction.memory.total),
                format_settings(layout),
            )
        )
    return f"{head}\n{textwrap.indent(table(rows), '    ')}"


def format_settings(layout: Proposal) -> str:
    """Its settings of `train`, as in a config."""
    return ", ".join(f"{name}: {str(value).lower()}" for name, value in layout.settings.items())


def _layout_as_json(proposal: Proposal) -> dict[str, Any]:
    prediction = proposal.prediction
    return {
        "settings": dict(proposal.settings),
        "layout": asdict(prediction.degrees),
        "memory": prediction.memory.total,
        "seconds_per_step": prediction.step.total if prediction.step else None,
        "tokens_per_second": _per_second(prediction),
    }


def _per_second(prediction: Prediction) -> float | None:
    return prediction.tokens_per_step / prediction.step.total if prediction.step else None


def _costs_as_json(prediction: Prediction, sizes: int) -> dict[str, Any]:
    """The costs as plain values, in bytes, seconds and FLOPs."""
    length, machine = prediction.length, prediction.machine
    return {
        "machine": {
            "name": machine.name,
            "kind": machine.kind,
            "known_by": machine.source,
            "memory": machine.memory,
        },
        "layout": asdict(prediction.degrees),
        "parameters": sizes,
        "memory": {**asdict(prediction.memory), "total": prediction.memory.total},
        "fits": prediction.fits,
        "step": prediction.step and {**asdict(prediction.step), "total": prediction.step.total},
        "flops_per_step": prediction.flops_per_step,
        "rows_per_step": prediction.rows_per_step,
        "tokens_per_step": prediction.tokens_per_step,
        "tokens_per_second": _per_second(prediction),
        "length": length and asdict(length),
        "seconds": prediction.seconds,
        "reference_seconds": prediction.reference_seconds,
        "disk": {**asdict(prediction.disk), "total": prediction.disk.total},
    }


def _format_count(value: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f}"


def format_bytes(value: float) -> str:
    """Bytes with a decimal unit, to three digits."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return "0" if not value else f"{value:.0f} B"


def format_seconds(seconds: float | None) -> str:
    """A duration in its unit, to three digits; n/a for None."""
    if seconds is None:
        return "n/a"
    # From two of a unit on: a day and a half is 36.0 h.
    for unit, size in (("days", 2 * 86400), ("h", 2 * 3600), ("min", 2 * 60)):
        if seconds >= size:
            return f"{seconds / (size / 2):.1f} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
