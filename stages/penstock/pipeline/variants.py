"""The runs of a tick: one that continues from a released model, and one that only evaluates.

Both are the configured run with some settings replaced, on the data of one plan.
"""

from collections.abc import Mapping
from pathlib import Path

from penstock.config.schema.checkpoint import SaveBestConfig
from penstock.config.schema.duration import EarlyStoppingConfig
from penstock.config.schema.run import RunConfig
from penstock.core.cache.stage import short, stage_key
from penstock.core.cache.store import PlannedStage
from penstock.core.errors import StageError
from penstock.core.remote.path import require_relative
from penstock.core.remote.urls import is_url, url_join
from penstock.pipeline.composing import with_composed_model
from penstock.pipeline.origins import resolve_model_source
from penstock.pipeline.plan import Plan, export_step, push_step, train_step


def continue_from_export(run: RunConfig, folder: Path, folders: Mapping[str, str]) -> RunConfig:
    """The run that continues from an exported model: from its adapter if the run trains one and
    there is one, else from its weights. The tokenizer, and so the prepared data, stays the same."""
    if run.lora.enable_lora and "adapter" in folders:
        adapter = str((folder / require_relative(folders["adapter"])).absolute())
        return run.with_fields("lora", init_adapter_path=adapter)
    run = with_composed_model(run)
    if "hf" not in folders:
        raise StageError(
            f"{folder} has only an adapter, and lora.enable_lora is false, so there is nothing "
            "to continue from.\n  Write release.start_from: model, or train adapters."
        )
    run = run.with_fields(
        "model",
        model_path=str((folder / require_relative(folders["hf"])).absolute()),
        config_path=None,
        tokenizer_path=run.model.tokenizer_source,
    )
    return run.with_fields("lora", init_adapter_path=None)


def as_eval_only(run: RunConfig) -> RunConfig:
    """The run with only an evaluation of its initial model, and without trackers."""
    quiet = dict.fromkeys(("use_wandb", "use_tensorboard", "use_mlflow", "use_trackio"), False)
    return run.with_fields(
        "train",
        **quiet,
        eval_only=True,
        enable_profiling=False,
        sample_prompts=[],
        # It would be loaded in place of the exported weights.
        load_checkpoint_path=None,
        early_stopping=EarlyStoppingConfig(),
        save_best=SaveBestConfig(),
    )


def with_own_output_dir(planned: Plan) -> Plan:
    """The plan with a subfolder of `train.output_dir` as output, named by the key of training."""
    run = with_output_dir(planned.run, short(stage_key(planned.step("train").stage)))
    train = train_step_on(run, planned)
    export = export_step(run, train.artifact, resolve_model_source(run))
    names = [step.stage.name for step in planned.steps]
    steps = [*planned.steps[: names.index("train")], train, export]
    if "push" in names:
        steps.append(push_step(run, export.artifact))
    return Plan(run, tuple(steps), composed=planned.composed)


def train_step_on(run: RunConfig, planned: Plan) -> PlannedStage:
    """The train step of the run on the data of a plan, so that all runs of a tick use the same
    data and, if the plan has a reference stage, the same reference log-probs."""
    artifacts = {step.stage.name: step.artifact for step in planned.steps}
    return train_step(
        run,
        artifacts["pack"],
        resolve_model_source(run),
        "torchrun",
        artifacts["prepare"],
        artifacts.get("reference"),
    )


def with_output_dir(run: RunConfig, *names: str) -> RunConfig:
    """The run with a subfolder of its `train.output_dir` as output."""
    return run.with_fields("train", output_dir=join_location(run.train.output_dir, *names))


def join_location(location: str, *names: str) -> str:
    """Join names to a folder or a URL."""
    return url_join(location, *names) if is_url(location) else str(Path(location).joinpath(*names))
