"""Stages of packages in a plan: their places among ours, and their steps."""

from collections.abc import Iterable, Sequence
from typing import cast

from penstock.config.schema.pipeline import STAGES, StageName
from penstock.config.schema.run import RunConfig
from penstock.core.cache.store import PlannedStage
from penstock.core.errors import ConfigError
from penstock.core.extensions import STAGES as REGISTRY


def stage_order(run: RunConfig) -> list[str]:
    """All stages, those of the run's packages after the last that they read."""
    order: list[str] = [*STAGES]
    for name in run.pipeline.extra_stages:
        index = max(order.index(read) for read in _reads(name)) + 1
        # Of several that read the same, the first one written is first.
        while index < len(order) and order[index] not in STAGES:
            index += 1
        order.insert(index, name)
    return order


def split_stages(
    run: RunConfig, targets: Sequence[str] | None
) -> tuple[tuple[StageName, ...], tuple[str, ...]]:
    """The stages of ours among those of `targets` (None: all) or read by one of a package, and
    those of packages, in order. Raises ConfigError for one that the run does not have."""
    # Of several nodes only the first one has what stages after training read.
    needed = {*run.stages, *(() if run.launch.node_rank else run.pipeline.extra_stages)}
    if targets is not None:
        needed = {*targets}
    for name in reversed(stage_order(run)):
        if name in needed and name not in STAGES:
            needed.update(_reads(name))
    for name in needed.difference(STAGES, run.pipeline.extra_stages):
        REGISTRY.find(name)
        raise ConfigError(
            f"this run has no stage {name}.\n  Write pipeline.extra_stages: {{{name}: {{}}}}."
        )
    builtin = cast("tuple[StageName, ...]", tuple(name for name in STAGES if name in needed))
    return builtin, tuple(name for name in stage_order(run) if name in needed.difference(builtin))


def with_package_steps(
    run: RunConfig, steps: Iterable[PlannedStage], names: Sequence[str]
) -> list[PlannedStage]:
    """The steps with those of packages, in order."""
    if not names:
        return [*steps]
    # A finished run without stages of packages needs none of it.
    from penstock.core.cache.package_stage import PackageStep  # noqa: PLC0415

    planned = {step.stage.name: step for step in steps}
    results = {name: step.artifact for name, step in planned.items()}
    for name in names:
        stage = PackageStep.build(name, run.pipeline.extra_stages[name], results)
        planned[name] = PlannedStage.in_root(stage, run.pipeline.artifacts_path)
        results[name] = planned[name].artifact
    order = stage_order(run)
    return sorted(planned.values(), key=lambda step: order.index(step.stage.name))


def _reads(name: str) -> tuple[str, ...]:
    return REGISTRY.load(name).reads
