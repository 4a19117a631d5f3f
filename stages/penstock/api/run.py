"""The `Run` of the Python API: its config, and methods that plan, run and read its stages."""

import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from penstock.api.pipeline import Notify, build_local_runner, rebuild_options, run_stages
from penstock.api.report import Report, run_result
from penstock.api.results import (
    ExportedModel,
    PackedData,
    PreparedData,
    Result,
    RunResult,
    Training,
    as_result,
)
from penstock.api.status import StageStatus, Standing, stage_statuses
from penstock.api.tables import html_table, table
from penstock.config.schema.run import RunConfig
from penstock.core.cache.input_digests import read_attempt
from penstock.core.cache.manifest import read_manifest
from penstock.core.cache.stage import short
from penstock.core.cache.store import PlannedStage, StageResult, fetch_cached, find_cached
from penstock.core.errors import PenstockError, StageError
from penstock.pipeline.outputs import find_unwritable, output_folders
from penstock.pipeline.plan import Plan, RebuildOptions, StageName, plan

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from penstock.api.model import AdapterForm


def print_line(line: str) -> None:
    """Write a line to stderr."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


@dataclass(frozen=True, repr=False)
class RunPlan:
    """The state of each stage of a run, and why; displayed as a table."""

    stages: tuple[StageStatus, ...]
    notes: tuple[str, ...] = ()
    """Settings that were inferred from the data, and folders that are not writable."""

    def __repr__(self) -> str:
        reasons = [line for stage in self.stages for line in stage.reasons]
        return "\n".join([table(self._rows()), *reasons, *self.notes])

    def _repr_html_(self) -> str:
        reasons = [line for stage in self.stages for line in stage.reasons]
        rows = [[line] for line in (*reasons, *self.notes)]
        return html_table(self._rows()) + (html_table([["why"], *rows]) if rows else "")

    def _rows(self) -> list[tuple[str, ...]]:
        heading = ("stage", "key", "standing", "where")
        return [heading, *((s.stage, s.key, s.standing, s.where) for s in self.stages)]


class Run:
    """One fine-tuning run, from `penstock.load`.

    Results are in the same store as those of the command line, and each reuses the other's.
    A method that runs a stage first runs the stages that it needs, and returns when it is done.
    It raises ConfigError, CapabilityError, ArtifactError or StageError; Interrupted if something
    else stopped training, and KeyboardInterrupt after Ctrl-C. After each of these the same call
    resumes.
    """

    def __init__(self, config: RunConfig, notify: Notify = print_line) -> None:
        self.config = config
        """The validated config, frozen: `run.config.train.lr`."""
        self._notify = notify

    @property
    def stages(self) -> tuple[StageName, ...]:
        """The stages of this run, in order."""
        return self.config.stages

    def plan(self) -> RunPlan:
        """Which stages are cached, partial, stale or missing, and why. Builds nothing."""
        planned = plan(self.config)
        folders = output_folders(planned.run, self.stages)
        warnings = [f"warning: {refusal}" for refusal in find_unwritable(folders)]
        return RunPlan(tuple(stage_statuses(planned)), (*planned.notes, *warnings))

    def status(self) -> dict[str, Standing]:
        """The state of each stage: `cached`, `skipped`, `partial`, `stale` or `missing`."""
        return {stage.stage: stage.standing for stage in self.plan().stages}

    def run(
        self,
        *,
        force: str | Collection[str] = (),
        start: str | None = None,
        fresh: bool = False,
    ) -> RunResult:
        """Run every stage, in order, as `penstock run`.

        `force` names stages to build again, `start` one to build again with all after it; `fresh`
        moves another run's `train.output_dir` aside instead of refusing it.
        """
        return self._run_stages(None, rebuild_options(force, start, fresh=fresh))

    def prepare(self, *, force: bool = False) -> PreparedData:
        """Tokenize the data. `force` builds it again."""
        return cast(PreparedData, self._stage("prepare", force))

    def encode(self, *, force: bool = False) -> Result:
        """Compute the features of all images (`data.encode_images`)."""
        return self._stage("encode", force)

    def pack(self, *, force: bool = False) -> PackedData:
        """Pack the samples into sequences."""
        return cast(PackedData, self._stage("pack", force))

    def reference(self, *, force: bool = False) -> Result:
        """Compute the log-probs of all completions under the reference model."""
        return self._stage("reference", force)

    def train(self, *, force: bool = False, fresh: bool = False) -> Training:
        """Train, from the newest checkpoint if there is one."""
        return cast(Training, self._stage("train", force, fresh=fresh))

    def export(self, *, force: bool = False) -> ExportedModel:
        """Write the trained model in Hugging Face's format."""
        return cast(ExportedModel, self._stage("export", force))

    def push(self, *, force: bool = False) -> Result:
        """Send the exported model to the hub or to a URL."""
        return self._stage("push", force)

    def stage(self, name: str, *, force: bool = False) -> Result:
        """Run a stage of an installed package (`pipeline.extra_stages`), or one of ours."""
        return self._stage(name, force)

    def model(
        self, *, adapter: "AdapterForm | None" = None, **options: Any
    ) -> "tuple[PreTrainedModel | PeftModel, PreTrainedTokenizerBase]":
        """The exported model, in evaluation mode, and its tokenizer.

        With `adapter="merged"` an adapter is merged into the weights, with `adapter="peft"` it is
        loaded as a PeftModel; by default it is merged if the export has a merged model. `options`
        go to
        `AutoModelForCausalLM.from_pretrained`: `device_map="auto"`, `dtype=torch.bfloat16`.

        Raises StageError if nothing is exported, ConfigError for an adapter that the run does not
        have, and CapabilityError if a required package is not installed.
        """
        step = plan(self.config, ("export",)).step("export")
        manifest = fetch_cached(step, self.config.pipeline.verify, self._notify)
        if manifest is None:
            raise StageError(
                "nothing is exported yet for this config.\n  Call run() or export() first."
            )
        from penstock.api.model import load_exported

        return load_exported(step.path, manifest["facts"]["folders"], adapter, **options)

    @property
    def report(self) -> Report:
        """The report of the training: its page, figures and metrics so far."""
        planned = plan(self.config)
        done = _cached_results(planned)
        begun = [s.path for s in planned.steps if s.stage.name == "train" and _has_started(s)]
        return Report(begun[0] if begun else None, run_result(done) if "train" in done else {})

    def __repr__(self) -> str:
        return f"Run({self.config.pipeline.name}: {' -> '.join(self.stages)})"

    def _repr_html_(self) -> str:
        try:
            return html_table([("stage", "standing"), *self.status().items()])
        except (PenstockError, OSError):
            # IPython prints the traceback of a `_repr_html_` that raises.
            return html_table([("stage",), *((name,) for name in self.stages)])

    def _stage(self, name: str, force: bool, *, fresh: bool = False) -> Result:
        rebuild = RebuildOptions(frozenset([name] if force else []), fresh=fresh)
        return self._run_stages(name, rebuild)[name]

    def _run_stages(self, last: str | None, rebuild: RebuildOptions) -> RunResult:
        planned = plan(self.config, (last,) if last else None)
        run_stage, notify = build_local_runner(self._notify), self._notify
        try:
            done = run_stages(planned, run_stage, rebuild, notify=notify, last=last)
            return RunResult([as_result(outcome) for outcome in done])
        except KeyboardInterrupt:
            notify("interrupted; the same call resumes")
            raise


def _cached_results(planned: Plan) -> dict[str, StageResult]:
    """The results that are complete, by stage."""
    results: dict[str, StageResult] = {}
    for step in planned.steps:
        if manifest := find_cached(step):
            key = short(step.artifact.key)
            results[step.stage.name] = StageResult(
                step.stage.name, key, "cached", step.path, 0.0, manifest["facts"], step.remote
            )
    return results


def _has_started(step: PlannedStage) -> bool:
    """Whether the folder belongs to this run, finished or not, and not to another one."""
    record = read_manifest(step.path) or read_attempt(step.path)
    return record is not None and record["key"] == step.artifact.key
