"""`penstock plan --dry-run`: what a step of a layout holds, sends and waits for."""

import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.cli.console import Console, table
from penstock.cli.inspect_commands import PlanOptions
from penstock.cli.plan.costs import (
    format_bytes,
    format_ranks,
    format_seconds,
    format_settings,
)
from penstock.cli.run import Request
from penstock.config.loading.cli_overrides import Override, split_overrides
from penstock.config.schema.run import RunConfig
from penstock.core.errors import CapabilityError, ConfigError
from penstock.core.machine.gpus import gpu_names
from penstock.engine.distributed.parallel_dims import build_parallel_dims, rows_per_step
from penstock.engine.distributed.validate_layout import ModelDims
from penstock.estimate.costs.chosen_settings import choose_settings
from penstock.estimate.costs.device_speed import DEVICES_PER_NODE, find_machine
from penstock.estimate.costs.estimate import Prediction, build_cost_model, predict
from penstock.estimate.costs.find_layouts import LayoutSearch, find_fastest_layouts, with_train
from penstock.estimate.costs.token_counts import DataFacts, with_row_length
from penstock.estimate.dryrun.chrome_trace import write_chrome_trace
from penstock.estimate.dryrun.dry_run import MAX_RANKS, dry_run, select_ranks
from penstock.estimate.dryrun.summary import DryRun, RankSummary
from penstock.estimate.machine import resolve_hf_config, with_prompts_apart, world_size
from penstock.pipeline.composing import with_composed_model
from penstock.pipeline.plan import plan

DEFAULT_DEVICE = "H100"
"""Device of a dry run on a machine without a GPU."""

NO_ENDPOINT = Override("launch.rdzv_endpoint", "localhost:29500")

MAX_ROWS = 12
"""Rows of a table; --json has all."""

BEST_LAYOUTS = 3
"""Layouts of the search that are run dry."""


def dry_run_config(request: Request, options: PlanOptions, console: Console) -> dict[str, Any]:
    """Run the layouts of a config dry and print what was found.

    Raises ConfigError for invalid options or layouts, CapabilityError if no layout fits.
    """
    if options.world:
        local = min(options.world, DEVICES_PER_NODE)
        if options.world % local:
            raise ConfigError(
                f"--world {options.world} is no multiple of {local} ranks per machine."
            )
        added = [
            Override("launch.nproc_per_node", str(local)),
            Override("launch.nnodes", str(options.world // local)),
        ]
        request = replace(request, overrides=(*request.overrides, *added))
    # Several machines meet nowhere here, and a config may leave open where they would.
    request = replace(request, overrides=(NO_ENDPOINT, *request.overrides))
    run = _with_row_length(request.load())
    if options.devices:
        if options.compare or options.world:
            raise ConfigError(
                "--devices searches layouts, and --world and --compare name them.\n"
                "  Write --devices alone, or leave it out."
            )
        layouts = list(_fastest_layouts(run, options.devices, options))
        if not layouts:
            raise ConfigError(
                f"no layout of this run on {options.devices} devices is valid and fits.\n"
                "  Ask for more devices, or write a smaller data.sample_packing_sequence_len."
            )
        options = replace(options, world=options.devices)
    else:
        layouts = [("", run)]
    for text in options.compare:
        layout_request = replace(request, overrides=(*request.overrides, *_parse_overrides(text)))
        layouts.append((text, _with_row_length(layout_request.load())))
    return print_dry_run(layouts, options, console)


def _with_row_length(run: RunConfig) -> RunConfig:
    run = with_composed_model(run)
    steps = plan(run).steps
    if all(step.stage.name != "train" for step in steps):
        raise ConfigError("--dry-run is about training, and this run does not train.")
    run, _ = with_prompts_apart(run)
    vocab_size = build_cost_model(run, resolve_hf_config(run)).config.vocab_size
    return with_row_length(run, DataFacts.read(steps), steps, vocab_size)


def _parse_overrides(text: str) -> list[Override]:
    """`section.field=value` pairs, separated by spaces."""
    unparsed, overrides = split_overrides([f"--{argument}" for argument in shlex.split(text)])
    if unparsed or not overrides:
        raise ConfigError(
            f"--compare {text!r} has no fields.\n"
            "  Write for example --compare 'train.tensor_parallel_size=2'."
        )
    return overrides


def _fastest_layouts(
    run: RunConfig, devices: int, options: PlanOptions
) -> Iterator[tuple[str, RunConfig]]:
    hf_config = resolve_hf_config(run)
    dims = build_parallel_dims(run.train, options.world or world_size(run))
    rows = rows_per_step(run.train, dims.num_replicas)
    model, counts = build_cost_model(run, hf_config), ModelDims.of(hf_config)
    machine = find_machine(_device_name(options))
    search = LayoutSearch(run, model, counts, machine, devices, rows, None)
    for proposal in find_fastest_layouts(search, limit=BEST_LAYOUTS):
        yield format_settings(proposal), with_train(run, proposal.settings)


@dataclass(frozen=True)
class Layout:
    """A layout that was run dry, beside the estimate from its shapes."""

    name: str
    dry_run: DryRun
    estimate: Prediction


def print_dry_run(
    layouts: Sequence[tuple[str, RunConfig]], options: PlanOptions, console: Console
) -> dict[str, Any]:
    """Run each (name, run) dry and print what was found; several side by side.

    Raises CapabilityError if no layout fits the device.
    """
    done: list[Layout] = []
    for name, run in layouts:
        console.say(f"dry run: {name or 'the config'}")
        if run.train.enable_compile:
            console.say(
                "    train.enable_compile is not simulated: kernels are those of eager mode"
            )
        chosen = choose_settings(run, find_machine(_device_name(options)))
        if chosen.note:
            console.say(f"    {chosen.note}")
        done.append(run_layout(name, chosen.run, options))
    console.result(_format_layout(done[0]) if len(done) == 1 else _format_comparison(done))
    values = [
        {
            "settings": layout.name,
            **layout.dry_run.as_json(),
            "estimated_memory": layout.estimate.memory.total,
        }
        for layout in done
    ]
    # Not returned: the JSON object has them also if no layout fits, which raises below.
    console.more["dry_run"] = values
    if options.trace:
        write_chrome_trace(done[0].dry_run.ranks, options.trace)
        console.say(f"timeline: {options.trace}")
    if not any(layout.dry_run.fits for layout in done):
        raise CapabilityError(_misfit(min(done, key=lambda layout: layout.dry_run.peak)))
    return {}


def run_layout(name: str, run: RunConfig, options: PlanOptions) -> Layout:
    """Run one layout dry. Raises ConfigError for a layout that is invalid for these ranks."""
    dims = build_parallel_dims(run.train, options.world or world_size(run))
    if options.ranks == "all" and dims.world_size > MAX_RANKS:
        raise ConfigError(
            f"--ranks all would start {dims.world_size} processes.\n"
            f"  Leave it out, or ask for at most {MAX_RANKS} ranks: those of one pipeline stage do "
            "the same."
        )
    device, hf_config = _device_name(options), resolve_hf_config(run)
    ranks, local_ranks = select_ranks(dims, options.ranks), min(dims.world_size, DEVICES_PER_NODE)
    result = dry_run(run, hf_config, dims, ranks, device_name=device, local_ranks=local_ranks)
    model = build_cost_model(run, hf_config)
    return Layout(name, result, predict(run, model, dims, find_machine(device), None))


def _device_name(options: PlanOptions) -> str:
    names = gpu_names()
    return options.device_kind or (names[0] if names else DEFAULT_DEVICE)


def _misfit(layout: Layout) -> str:
    result = layout.dry_run
    worst = max(result.ranks, key=lambda rank: rank.result.peak)
    most = max(worst.result.holders.items(), key=lambda item: item[1])
    return (
        f"a step needs {format_bytes(result.peak)} on rank {worst.rank}, and {result.device_name} "
        f"has {format_bytes(result.device.memory)}; {most[0]} hold {format_bytes(most[1])} of it.\n"
        "  penstock plan CONFIG --devices N lists layouts that fit."
    )


def _format_layout(layout: Layout) -> str:
    result = layout.dry_run
    ranks = ", ".join(str(rank.rank) for rank in result.ranks)
    mfu = "" if result.mfu is None else f", {100 * result.mfu:.0f} % of the device's FLOP/s"
    lines = [
        f"dry run of {format_ranks(result.dims)} on {result.device_name}: rank {ranks} run",
        f"    step     {format_seconds(result.seconds)}, {result.tokens_per_second:,.0f} tokens/s"
        f"{mfu}; {_format_limits(result)}",
        f"    memory   {format_bytes(result.peak)} of {format_bytes(result.device.memory)} at the "
        f"peak (estimate from shapes: {format_bytes(layout.estimate.memory.total)})",
    ]
    lines += [f"    rank {rank.rank:<4}{_format_rank(rank)}" for rank in result.ranks[:MAX_ROWS]]
    worst = max(result.ranks, key=lambda rank: rank.result.peak)
    lines += ["", f"collectives of rank {worst.rank}", _collectives(worst)]
    lines += ["", f"host syncs of rank {worst.rank}", _syncs(worst)]
    if result.faults:
        faults = [
            (f"{times} x", cause, code_line) for (cause, code_line), times in result.faults.items()
        ]
        lines += ["", "faults", _indented_table([("times", "fault", "where"), *faults])]
    return "\n".join(lines)


def _format_limits(result: DryRun) -> str:
    parts = [
        f"{name} {100 * share:.0f} %" for name, share in result.limits.items() if share >= 0.005
    ]
    bubble = [] if result.bubble is None else [f"pipeline bubble {100 * result.bubble:.0f} %"]
    return ", ".join([*parts, *bubble])


def _format_rank(rank: RankSummary) -> str:
    held = ", ".join(
        f"{name} {format_bytes(size)}" for name, size in rank.result.holders.items() if size
    )
    return (
        f" {format_bytes(rank.result.peak)} ({held}); {rank.launches:,} launches"
        f", {sum(rank.syncs.values())} host syncs ({rank.syncs_in_micro_batches} in micro-batches)"
    )


def _collectives(rank: RankSummary) -> str:
    rows = [("times", "collective", "ranks", "dtype", "bytes", "exposed", "phase", "where")]
    for use in rank.collectives()[:MAX_ROWS]:
        rows.append(
            (
                str(use.times),
                use.name,
                str(use.group_size),
                use.dtype,
                format_bytes(use.num_bytes),
                format_seconds(use.exposed_seconds) if use.exposed_seconds else "",
                use.phase,
                use.call_site,
            )
        )
    return _indented_table(rows)


def _syncs(rank: RankSummary) -> str:
    rows = [("times", "sync", "phase", "where")]
    rows += [(str(times), *key) for key, times in rank.syncs.most_common(MAX_ROWS)]
    return _indented_table(rows)


def _format_comparison(layouts: Sequence[Layout]) -> str:
    rows = [("step", "tokens/s", "memory", "estimate", "exposed", "syncs", "launches", "settings")]
    for layout in sorted(
        layouts, key=lambda candidate: (not candidate.dry_run.fits, candidate.dry_run.seconds)
    ):
        result = layout.dry_run
        worst = max(result.ranks, key=lambda rank: rank.timeline.seconds)
        rows.append(
            (
                format_seconds(result.seconds),
                f"{result.tokens_per_second:,.0f}",
                format_bytes(result.peak) + ("" if result.fits else " does not fit"),
                format_bytes(layout.estimate.memory.total),
                format_seconds(worst.timeline.exposed_seconds),
                str(sum(worst.syncs.values())),
                f"{worst.launches:,}",
                layout.name or "the config",
            )
        )
    device = layouts[0].dry_run.device_name
    return f"dry runs on {device}\n{_indented_table(rows)}"


def _indented_table(rows: Sequence[tuple[str, ...]]) -> str:
    return textwrap.indent(table(rows), "    ")
