"""`penstock eval`: evaluates an exported model on held-out prompts or on tasks of the
lm-evaluation-harness."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.api.load_config import load_config
from penstock.cli.console import Console, table
from penstock.cli.result_commands import EvalOptions
from penstock.config.loading.cli_overrides import Override
from penstock.config.schema.run import RunConfig
from penstock.core.cache.store import PlannedStage, fetch_cached
from penstock.core.errors import ConfigError, PenstockError, StageError
from penstock.core.os_errors import describe_os_error
from penstock.core.remote.artifact_sync import RemoteArtifact
from penstock.pipeline.plan import Plan, plan
from penstock.train.eval.eval_results import write_held_out_results, write_task_scores
from penstock.train.launch.job import EVAL_RESULTS, JOB, REPORT

PRINTED_ANSWERS = 4
"""Number of completions that are printed."""
BATCH_SIZE = 50
DEFAULT_PROMPTS = 200
"""Default number of held-out prompts."""


def evaluate_target(
    target: Path, overrides: Sequence[Override], options: EvalOptions, console: Console
) -> dict[str, Any]:
    """Evaluate `target`: a config, a run's output folder, or a model folder.

    Raises ConfigError for options that do not apply to it, StageError if nothing is exported yet.
    """
    if options.harness_tasks and not options.tasks:
        raise ConfigError(
            f"--harness-tasks {options.harness_tasks} has tasks, and none is asked for.\n"
            "  Add --harness and their names."
        )
    if (target / "config.json").is_file() or (target / "adapter_config.json").is_file():
        if not options.tasks:
            raise ConfigError(
                f"{target} holds a model and nothing to ask it.\n"
                "  Add --harness with names of tasks, or name the run's config or output folder."
            )
        return _run_harness(target, options, 0, console)[0]
    run = load_run(target, overrides)
    if options.tasks:
        planned = plan(run, ("export",))
        facts, scores = _run_harness(_exported_folder(planned), options, run.train.seed, console)
        trained = planned.step("train")
        write_task_scores(trained.path, trained.artifact.key, scores, options.limit)
        _update_report(trained, console)
        return facts
    return _evaluate_held_out(run, options, console)


def load_run(target: Path, overrides: Sequence[Override]) -> RunConfig:
    """The run of a config or of a train.output_dir. Raises ConfigError for anything else."""
    if target.is_dir() and not (target / JOB).is_file():
        raise ConfigError(
            f"{target} holds neither a run nor a model: no {JOB} and no config.json is in it.\n"
            "  Name a config, a train.output_dir, or a folder in Hugging Face's format."
        )
    return load_config(target, overrides)


def _exported_folder(planned: Plan) -> Path:
    """The exported model folder, or the adapter folder if only an adapter was exported."""
    for step in planned.steps:
        if fetch_cached(step, planned.run.pipeline.verify) is None:
            raise StageError(
                f"{step.stage.name} has not been run for this config.\n  Run penstock run first."
            )
    exported = planned.step("export").artifact
    folders = exported.facts["folders"]
    return exported.path / folders.get("hf", folders.get("adapter", "hf"))


def _evaluate_held_out(run: RunConfig, options: EvalOptions, console: Console) -> dict[str, Any]:
    """Print the exact-match accuracy, some completions and the path of the report."""
    if not run.data.val_set_size and not run.data.test_datasets:
        raise ConfigError(
            "this run holds nothing out, so there is nothing to ask.\n"
            "  Write data.val_set_size or data.test_datasets, or add --harness TASKS."
        )
    try:
        answer = None if options.answer is None else re.compile(options.answer)
    except re.error as error:
        raise ConfigError(
            f"--answer {options.answer} is no regular expression: {error}.\n"
            "  Write one in Python's syntax, for example '#### (.+)'."
        ) from error
    planned = plan(run, ("export",))
    folder = _exported_folder(planned)
    # Imports torch and transformers, which refused options need not wait for.
    from penstock.evaluate.exact_match import exact_match

    trained = planned.step("train")
    report = exact_match(
        folder,
        planned.step("prepare").artifact,
        limit=DEFAULT_PROMPTS if options.limit is None else options.limit,
        seed=run.train.seed,
        batch_size=BATCH_SIZE,
        answer=answer,
    )
    facts = trained.artifact.facts
    eval_facts = {name: value for name, value in facts.items() if name.startswith("eval_")}
    lines = [
        f"{report.num_right} of {report.num_asked} held-out prompts right: {report.accuracy:.1%}"
        f" ({report.compared} compared)"
    ]
    if eval_facts:
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in eval_facts.items())
        lines.append(f"when it was trained: {numbers}")
    for sample in report.samples[:PRINTED_ANSWERS]:
        mark = "right" if sample.right else f"wrong, expected {sample.expected!r}"
        lines.append(f"  {sample.prompt.strip()!r} -> {sample.answer!r} ({mark})")
    lines.append(f"report: {trained.path / REPORT}")
    lines.append(f"model:  {trained.path / 'hf'}")
    console.result("\n".join(lines))
    result = {
        "accuracy": report.accuracy,
        "asked": report.num_asked,
        "right": report.num_right,
        "skipped": report.num_skipped,
        "compared": report.compared,
        "samples": [vars(sample) for sample in report.samples],
    }
    write_held_out_results(
        trained.path, trained.artifact.key, {**result, "pattern": options.answer}
    )
    _update_report(trained, console)
    return {**result, "trained": eval_facts}


def _update_report(trained: PlannedStage, console: Console) -> None:
    """Write the report of the run again, with the evaluation; a failure is only logged. The
    manifest of the run does not list the report."""
    from penstock.train.report import write_report

    try:
        write_report(trained.path)
        if trained.remote:
            RemoteArtifact(trained.remote, trained.path).send([EVAL_RESULTS, REPORT])
    except OSError as error:
        console.say(f"the report does not show it: {describe_os_error(error)}")
    except PenstockError as error:
        # Of a run at a URL, this machine may have only the complete result.
        console.say(f"the report does not show it: {error}")


def _run_harness(
    folder: Path, options: EvalOptions, seed: int, console: Console
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Print the scores of each task; returns the fields for --json, and the scores."""
    from penstock.evaluate.harness import run_tasks

    scores = run_tasks(
        folder,
        options.tasks,
        limit=options.limit,
        batch_size=BATCH_SIZE,
        seed=seed,
        more_tasks=options.harness_tasks,
    )
    rows = [("task", "metric", "value", "standard error")]
    for score in scores:
        error = "" if score.stderr is None else f"{score.stderr:.4f}"
        rows.append((score.task, score.metric, f"{score.value:.4f}", error))
    console.result(table(rows))
    facts = [vars(score) for score in scores]
    return {"model": str(folder), "scores": facts}, facts
