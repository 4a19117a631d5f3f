"""One tick of recurring fine-tuning: counts new samples, trains, and releases a better model.

A tick can be interrupted at any point, and the next one continues: all long work is in cached
stages, and nothing is released before the `latest` pointer moves. A tick without new data neither
reads data nor imports the modules for it.
"""

import math
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from filelock import Timeout

from penstock.config.schema.run import RunConfig, has_target
from penstock.core.cache.in_use import pin_artifacts
from penstock.core.cache.manifest import content_digest, read_manifest
from penstock.core.cache.record import digest_json
from penstock.core.cache.stage import short, stage_key
from penstock.core.cache.store import (
    PlannedStage,
    StageResult,
    find_cached,
    find_complete,
    lock_path,
)
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.file_lock import acquire_lock
from penstock.core.files import remove
from penstock.core.releases.local import Notify, ReleaseStore, release_folder_name
from penstock.core.remote.artifact_sync import RemoteArtifact
from penstock.core.remote.local_mirror import local_cache_dir
from penstock.core.remote.path import RemotePath
from penstock.core.remote.urls import is_url
from penstock.core.replace_folder import delete_folder
from penstock.pipeline.origins import with_adapter
from penstock.pipeline.plan import Plan, plan
from penstock.pipeline.releasing import (
    Candidate,
    Figures,
    is_better,
    is_release_from,
    open_releases,
    release,
    release_location,
    verified_folder,
)
from penstock.pipeline.variants import (
    as_eval_only,
    continue_from_export,
    join_location,
    train_step_on,
    with_output_dir,
    with_own_output_dir,
)
from penstock.prepare.stage import Prepare

if TYPE_CHECKING:
    from penstock.prepare.select.seen_samples import SeenSamples

RunStage = Callable[[Plan, str], StageResult]
"""Runs one stage of a plan, here or elsewhere, and returns its result."""

LOCK_FILE = ".at_work.lock"
KEY = re.compile(r"[0-9a-f]{16}")

EVALUATIONS = "evaluations"
"""Folder of `train.output_dir` for evaluations that compare models."""

Verdict = Literal[
    "released", "kept", "waiting", "up_to_date", "paused", "busy", "failed", "rolled_back"
]


@dataclass(frozen=True)
class Decision:
    """The outcome of a tick or of a rollback."""

    verdict: Verdict
    line: str
    """The outcome in one sentence."""
    release: int | None = None
    """The number of the latest release afterwards."""
    new_samples: int | None = None
    """None if they were not counted."""
    slices: int | None = None
    """Number of slices of the sources; None if the sources were not read."""
    reused_slices: int | None = None
    """Slices that had been tokenized before."""
    keys: Mapping[str, str] | None = None
    """Cache keys of the candidate's stages, 16 hex digits each."""
    figures: Figures | None = None
    """The evaluations that were compared."""

    def as_json(self) -> dict[str, Any]:
        """The record in the history of decisions."""
        return {"time": datetime.now(UTC).isoformat(timespec="seconds"), **_finite(asdict(self))}


@dataclass(frozen=True)
class NewData:
    """What the sources have that the latest release was not trained on."""

    new_samples: int
    slices: int | None = None
    reused_slices: int | None = None


def tick(run: RunConfig, run_stage: RunStage, notify: Notify) -> Decision:
    """Run one tick as the section `release` says. The decision is recorded with the releases.

    Raises ConfigError for a run that releases nothing, and what stages raise.
    """
    if run.launch.nnodes > 1:
        raise ConfigError(
            f"launch.nnodes is {run.launch.nnodes}, and a recurring run is started on one "
            "machine.\n  Leave it out, or start each run with penstock launch."
        )
    store = open_releases(run)
    with _exclusive(run) as is_alone:
        if not is_alone:
            decision = Decision("busy", f"{run.release.name}: another run of it is at work")
        else:
            try:
                decision = _Tick(run, store, run_stage, notify).decide()
            except PenstockError as error:
                first = str(error).split("\n", 1)[0]
                store.append_decision(Decision("failed", f"{run.release.name}: {first}").as_json())
                raise
        store.append_decision(decision.as_json())
    return decision


class _Tick:
    """The state of one tick."""

    def __init__(
        self, run: RunConfig, store: ReleaseStore, run_stage: RunStage, notify: Notify
    ) -> None:
        self.run, self.store, self.run_stage, self.notify = run, store, run_stage, notify
        self.options = run.release
        self.latest = store.latest()
        self.released: dict[str, Any] = store.manifest(self.latest) if self.latest else {}

    @property
    def release_status(self) -> str:
        """The current release, for messages."""
        if self.latest:
            return f"{self.options.name} stays at {release_folder_name(self.latest)}"
        return f"{self.options.name} is not released yet"

    def decide(self) -> Decision:
        """Count new samples, and train if there are enough."""
        planned = plan(self.run, ("prepare",))
        with pin_artifacts(planned.used):
            new_data = self._count_new_samples(planned)
            if skipped := self._skip_reason(new_data):
                verdict, why = skipped
                line = f"{self.release_status}: {why}"
                return Decision(verdict, line, self.latest, **asdict(new_data))
            return self._train(new_data)

    def _count_new_samples(self, planned: Plan) -> NewData:
        step = planned.step("prepare")
        assert isinstance(step.stage, Prepare)
        if self.released and self.released["inputs"]["prepare"]["key"] == stage_key(step.stage):
            return NewData(0)
        # Imported only if the sources have changed.
        from penstock.prepare.select.seen_samples import SeenSamples, load_seen_samples  # noqa: PLC0415

        # Before the stage runs: afterwards no slice is missing any more.
        progress = None if find_cached(step) else step.stage.progress(step.path)
        outcome = self.run_stage(planned, "prepare")
        count = sum(source["slices"] for source in outcome.facts["sources"])
        seen_samples = self._load_seen_samples() if self.released else SeenSamples()
        new = load_seen_samples(outcome.path, seen_samples.files).count_not_in(seen_samples)
        return NewData(new, *((progress.slices, progress.done) if progress else (count, count)))

    def _skip_reason(self, new_data: NewData) -> tuple[Verdict, str] | None:
        """Verdict and reason for not training; None if the tick trains."""
        count, options = new_data.new_samples, self.options
        samples = f"{count} new sample{'' if count == 1 else 's'}"
        if options.train_when == "never":
            return "paused", f"release.train_when is never; there are {samples}"
        if options.train_when == "always":
            return None
        if not count:
            return "up_to_date", "nothing is new"
        if count < options.min_new_samples:
            return "waiting", f"{samples}, and release.min_new_samples is {options.min_new_samples}"
        return None

    def _train(self, new_data: NewData) -> Decision:
        start = self.latest if self.options.start_from == "release" else None
        run = self.run
        if start is not None:
            folders = self.released["facts"]["folders"]
            run = continue_from_export(run, self._release_folder(start), folders)
        last_stage: str = "push" if has_target(run) else "export"
        planned = with_own_output_dir(plan(run, (last_stage,)))
        keys = {step.stage.name: short(stage_key(step.stage)) for step in planned.steps}
        fields: dict[str, Any] = {**asdict(new_data), "keys": keys}
        if number := self._find_existing_release(planned.step("export")):
            verdict: Verdict = "kept"
            why = f"{release_folder_name(number)}, which is withdrawn"
            if number == self.latest:
                verdict, why = "up_to_date", "it already"
            line = f"{self.release_status}: the model that the data gives is {why}"
            return Decision(verdict, line, self.latest, **fields)
        with pin_artifacts(planned.used):
            for step in planned.steps:
                name = step.stage.name
                # Only a model that is better is pushed, which the comparison below shows.
                if name != "push" and (name != "prepare" or find_cached(step) is None):
                    self.run_stage(planned, name)
            return self._compare_and_release(planned, start, new_data, fields)

    def _compare_and_release(
        self, planned: Plan, start: int | None, new_data: NewData, fields: dict[str, Any]
    ) -> Decision:
        figures = self._compare(planned) if self.options.metric else None
        if figures and not is_better(self.run, figures):
            self._delete_old_runs(fields["keys"]["train"])
            line = f"{self.release_status}: {_format_figures(figures, self.latest)}"
            if self.options.min_delta and self.latest:
                line += f", and release.min_delta is {self.options.min_delta:g}"
            return Decision("kept", line, self.latest, **fields, figures=figures)
        if has_target(planned.run):
            self.run_stage(planned, "push")
        seen_samples = self._all_seen_samples(planned, start)
        candidate = Candidate(
            planned, self.latest, start, seen_samples, new_data.new_samples, figures
        )
        number = release(self.store, candidate, self.notify)
        self._delete_old_runs(fields["keys"]["train"])
        if number is None:
            now = self.store.latest()
            line = (
                f"{self.options.name}: {release_folder_name(now or 0)} was released meanwhile; "
                "the next tick compares with it"
            )
            return Decision("kept", line, now, **fields, figures=figures)
        why = f"{_format_figures(figures, self.latest)}; " if figures else ""
        name = f"{self.options.name} {release_folder_name(number)}"
        line = f"{name} is released: {why}{new_data.new_samples} new samples"
        return Decision("released", line, number, **fields, figures=figures)

    def _compare(self, planned: Plan) -> Figures:
        """Evaluate the exported model and the released one on the held-out rows."""
        exported = planned.step("export")
        manifest = find_cached(exported)
        assert manifest, "the export has just run"
        new = self._evaluate(planned, exported.path, manifest["facts"]["folders"])
        old: dict[str, float] = {}
        if self.latest:
            folders = self.released["facts"]["folders"]
            old = self._evaluate(planned, self._release_folder(self.latest), folders)
        metric = self.options.metric or ""
        for scores in (new, *([old] if old else [])):
            if metric not in scores:
                raise ConfigError(
                    f"release.metric is {metric}, which no evaluation of this run reports.\n"
                    f"  Evaluations report {', '.join(sorted(scores)) or 'nothing'}."
                )
        return Figures(metric, new[metric], old.get(metric), new, old)

    def _evaluate(
        self, planned: Plan, folder: Path, folders: Mapping[str, str]
    ) -> dict[str, float]:
        """The evaluation metrics of the model in the folder, on the data of `planned` even if the
        sources have grown since."""
        eval_run = with_adapter(as_eval_only(continue_from_export(self.run, folder, folders)))
        step = train_step_on(eval_run, planned)
        # None: as the folder of all rows was named when their number was in no key.
        rows = short(digest_json([stage_key(step.stage), None]))
        eval_run = with_output_dir(eval_run, EVALUATIONS, rows)
        steps = (planned.step("prepare"), planned.step("pack"), train_step_on(eval_run, planned))
        facts = self.run_stage(Plan(eval_run, steps), "train").facts
        return {name: value for name, value in facts.items() if name.startswith("eval_")}

    def _find_existing_release(self, export: PlannedStage) -> int | None:
        """The number of the latest or a withdrawn release that is this export."""
        manifest = find_complete(export)
        if manifest and find_cached(export) is None:
            return None  # stale: one of its inputs was built again since
        key, content = stage_key(export.stage), content_digest(manifest) if manifest else None
        numbers = {*self.store.withdrawn, *([self.latest] if self.latest else [])}
        # A release that is withdrawn may have been pruned since.
        for number in sorted(numbers & set(self.store.numbers()), reverse=True):
            if is_release_from(self.store.manifest(number), key, content):
                return number
        return None

    def _release_folder(self, number: int) -> Path:
        return verified_folder(self.store, number, self.run.pipeline.verify)

    def _load_seen_samples(self) -> "SeenSamples":
        from penstock.prepare.select.seen_samples import SeenSamples  # noqa: PLC0415

        assert self.latest
        data_files = self.released["facts"]["data_files"]
        return SeenSamples.read(self._release_folder(self.latest), data_files)

    def _all_seen_samples(self, planned: Plan, start: int | None) -> "SeenSamples":
        """The samples of this data, and of the releases that training continued from."""
        from penstock.prepare.select.seen_samples import load_seen_samples  # noqa: PLC0415

        prepared = planned.step("prepare").path
        if start is None:
            return load_seen_samples(prepared)
        before = self._load_seen_samples()
        return before | load_seen_samples(prepared, before.files)

    def _delete_old_runs(self, run_name: str) -> None:
        """Delete the folders of earlier models beyond `release.keep_runs`."""
        if self.options.keep_runs is None:
            return
        output = self.run.train.output_dir
        decided = [
            decision["keys"]["train"] for decision in self.store.decisions() if decision.get("keys")
        ]
        newest_first = list(dict.fromkeys([run_name, *reversed(decided)]))
        is_here = RemotePath.from_url(output).names() if is_url(output) else set(newest_first)
        for key in newest_first[self.options.keep_runs :]:
            if key not in is_here or not KEY.fullmatch(key):
                continue
            folder = local_cache_dir(join_location(output, key))
            if is_url(output):
                RemoteArtifact(join_location(output, key), folder).delete()
            # A folder of the user's may have such a name, too.
            elif (read_manifest(folder) or {}).get("stage") != "train":
                continue
            delete_folder(folder)
            remove(lock_path(folder))


@contextmanager
def _exclusive(run: RunConfig) -> Generator[bool]:
    """Hold the lock of this release on this machine; yields false if another tick holds it."""
    folder = local_cache_dir(release_location(run))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = acquire_lock(folder / LOCK_FILE, timeout=0)
    except Timeout:
        yield False
        return
    with lock:
        yield True


def _format_figures(figures: Figures, latest: int | None) -> str:
    """The metric of the new and of the released model."""
    sentence = f"{figures.metric} of the new model is {figures.new:.6g}"
    if figures.released is not None and latest:
        sentence += f", of {release_folder_name(latest)} {figures.released:.6g}"
    return sentence


def _finite(value: Any) -> Any:
    """The value with NaN and infinities as strings, which JSON cannot represent."""
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
