"""One look at a run's sources: what is new, whether to train, and whether the result is released.

A tick can be broken off anywhere and is made up for by the next one: everything that takes time is
a stage, found again by its key, and nothing counts as released before the pointer has moved. One
that finds nothing new neither reads data nor imports what works with it.
"""

import math
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from filelock import FileLock, Timeout

from penstock.config.schema.run import RunConfig, has_target
from penstock.core.cache.in_use import in_use
from penstock.core.cache.manifest import content_digest, read_manifest
from penstock.core.cache.record import digest_json
from penstock.core.cache.stage import short, stage_key
from penstock.core.cache.store import PlannedStage, StageResult, find_cached, lock_path, sealed
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.files import remove
from penstock.core.releases.local import Notify, ReleaseStore, release_folder_name
from penstock.core.remote.artifact_sync import RemoteArtifact
from penstock.core.remote.local_mirror import local_cache_dir
from penstock.core.remote.path import RemotePath
from penstock.core.remote.urls import is_url
from penstock.origins import with_adapter
from penstock.plan import Plan, StageName, plan
from penstock.prepare.stage import Prepare
from penstock.releasing import (
    Candidate,
    Figures,
    is_better,
    is_release_from,
    open_releases,
    release,
    release_location,
    verified_folder,
)
from penstock.variants import (
    below,
    going_on,
    in_own_folder,
    only_evaluating,
    trained_on,
    with_output,
)

if TYPE_CHECKING:
    from penstock.prepare.select.seen_samples import SeenSamples

Bring = Callable[[Plan, StageName], StageResult]
"""Brings one stage of a plan up, wherever it runs, and says what became of it."""

AT_WORK = ".at_work.lock"
KEY = re.compile(r"[0-9a-f]{16}")

EVALUATIONS = "evaluations"
"""Folder of `train.output_dir` for what models were told when they were compared."""

Verdict = Literal[
    "released", "kept", "waiting", "up_to_date", "paused", "busy", "failed", "rolled_back"
]


@dataclass(frozen=True)
class Decision:
    """What became of a tick, or of a wish to roll back."""

    verdict: Verdict
    line: str
    """It in one sentence, for people."""
    release: int | None = None
    """What is released after it."""
    new_samples: int | None = None
    """None where they were not counted."""
    slices: int | None = None
    """Slices of the sources; None where nobody looked at them."""
    reused_slices: int | None = None
    """Those of them that had been tokenized before."""
    keys: Mapping[str, str] | None = None
    """Of the stages of the model that was looked at, 16 digits."""
    figures: Figures | None = None
    """What was compared."""

    def as_json(self) -> dict[str, Any]:
        """The record that is kept."""
        return {"time": datetime.now(UTC).isoformat(timespec="seconds"), **_finite(asdict(self))}


@dataclass(frozen=True)
class Arrivals:
    """What the sources hold, seen from the release."""

    new_samples: int
    slices: int | None = None
    reused_slices: int | None = None

    def said(self) -> dict[str, Any]:
        """The part of a decision that tells of it."""
        return asdict(self)


def tick(run: RunConfig, bring: Bring, notify: Notify) -> Decision:
    """Look, and do what the section `release` says. What was decided is kept beside the releases.

    Raises ConfigError for a run that releases nothing, and what stages raise.
    """
    if run.launch.nnodes > 1:
        raise ConfigError(
            f"launch.nnodes is {run.launch.nnodes}, and a run that recurs is started on one "
            "machine.\n  Leave it out, or start each run with penstock launch."
        )
    shelf = open_releases(run)
    with _alone(run) as is_alone:
        if not is_alone:
            decision = Decision("busy", f"{run.release.name}: another run of it is at work")
        else:
            try:
                decision = _Tick(run, shelf, bring, notify).decide()
            except PenstockError as error:
                first = str(error).split("\n", 1)[0]
                shelf.tell(Decision("failed", f"{run.release.name}: {first}").as_json())
                raise
        shelf.tell(decision.as_json())
    return decision


class _Tick:
    """One tick, with what it knows from the beginning."""

    def __init__(self, run: RunConfig, shelf: ReleaseStore, bring: Bring, notify: Notify) -> None:
        self.run, self.shelf, self.bring, self.notify = run, shelf, bring, notify
        self.wish = run.release
        self.latest = shelf.latest()
        self.released: dict[str, Any] = shelf.manifest(self.latest) if self.latest else {}

    @property
    def standing(self) -> str:
        """What people call what is released now."""
        is_what = (
            f"stays at {release_folder_name(self.latest)}" if self.latest else "is not released yet"
        )
        return f"{self.wish.name} {is_what}"

    def decide(self) -> Decision:
        """Count, and train or not."""
        looked = plan(self.run, ("prepare",))
        with in_use(looked.steps):
            arrived = self._arrived(looked)
            if verdict := self._is_enough(arrived):
                verdict, why = verdict
                return Decision(verdict, f"{self.standing}: {why}", self.latest, **arrived.said())
            return self._train(arrived)

    def _arrived(self, looked: Plan) -> Arrivals:
        step = looked.step("prepare")
        assert isinstance(step.stage, Prepare)
        if self.released and self.released["inputs"]["prepare"]["key"] == stage_key(step.stage):
            return Arrivals(0)
        # Only where data has come is anything imported that reads it.
        from penstock.prepare.select.seen_samples import SeenSamples, known_in  # noqa: PLC0415

        there = None if find_cached(step) else step.stage.progress(step.path)
        outcome = self.bring(looked, "prepare")
        count = sum(source["slices"] for source in outcome.facts["sources"])
        known = self._known() if self.released else SeenSamples()
        new = known_in(outcome.path, known.files).without(known)
        return Arrivals(new, *((there.slices, there.done) if there else (count, count)))

    def _is_enough(self, arrived: Arrivals) -> tuple[Verdict, str] | None:
        """Why nothing is trained; None where something is."""
        count, wish = arrived.new_samples, self.wish
        samples = f"{count} new sample{'' if count == 1 else 's'}"
        if wish.train_when == "never":
            return "paused", f"release.train_when is never; there are {samples}"
        if wish.train_when == "always":
            return None
        if not count:
            return "up_to_date", "nothing is new"
        if count < wish.min_new_samples:
            return "waiting", f"{samples}, and release.min_new_samples is {wish.min_new_samples}"
        return None

    def _train(self, arrived: Arrivals) -> Decision:
        start = self.latest if self.wish.start_from == "release" else None
        run = self.run
        if start is not None:
            run = going_on(run, self._folder_of(start), self.released["facts"]["folders"])
        wanted: StageName = "push" if has_target(run) else "export"
        planned = in_own_folder(plan(run, (wanted,)))
        keys = {step.stage.name: short(stage_key(step.stage)) for step in planned.steps}
        said: dict[str, Any] = {**arrived.said(), "keys": keys}
        if number := self._is_there_already(planned.step("export")):
            why = "the model that the data gives is "
            why += (
                "it already"
                if number == self.latest
                else f"{release_folder_name(number)}, which is withdrawn"
            )
            verdict: Verdict = "up_to_date" if number == self.latest else "kept"
            return Decision(verdict, f"{self.standing}: {why}", self.latest, **said)
        with in_use(planned.steps):
            for step in planned.steps:
                name = cast(StageName, step.stage.name)
                if name != "push" and (name != "prepare" or find_cached(step) is None):
                    self.bring(planned, name)
            return self._judge(planned, start, arrived, said)

    def _judge(
        self, planned: Plan, start: int | None, arrived: Arrivals, said: dict[str, Any]
    ) -> Decision:
        figures = self._compared(planned) if self.wish.metric else None
        if figures and not is_better(self.run, figures):
            self._tidy(said["keys"]["train"])
            line = f"{self.standing}: {_told(figures, self.latest)}{self._asked()}"
            return Decision("kept", line, self.latest, **said, figures=figures)
        if has_target(planned.run):
            self.bring(planned, "push")
        known = self._all_known(planned, start)
        candidate = Candidate(planned, self.latest, start, known, arrived.new_samples, figures)
        number = release(self.shelf, candidate, self.notify)
        self._tidy(said["keys"]["train"])
        if number is None:
            now = self.shelf.latest()
            released = release_folder_name(now or 0)
            line = f"{self.wish.name}: {released} was released meanwhile; it is looked at next"
            return Decision("kept", line, now, **said, figures=figures)
        count = arrived.new_samples
        why = f"{_told(figures, self.latest)}; " if figures else ""
        line = (
            f"{self.wish.name} {release_folder_name(number)} is released: {why}{count} new samples"
        )
        return Decision("released", line, number, **said, figures=figures)

    def _compared(self, planned: Plan) -> Figures:
        """What the exported model and the released one make of the rows that are held out."""
        exported = planned.step("export")
        made = find_cached(exported)
        assert made, "exported a moment ago"
        new = self._evaluated(planned, exported.path, made["facts"]["folders"])
        old: dict[str, float] = {}
        if self.latest:
            folders = self.released["facts"]["folders"]
            old = self._evaluated(planned, self._folder_of(self.latest), folders)
        metric = self.wish.metric or ""
        for told in (new, *([old] if old else [])):
            if metric not in told:
                raise ConfigError(
                    f"release.metric is {metric}, which no evaluation of this run tells.\n"
                    f"  Evaluations tell {', '.join(sorted(told)) or 'nothing'}."
                )
        return Figures(metric, new[metric], old.get(metric), new, old)

    def _evaluated(
        self, planned: Plan, folder: Path, folders: Mapping[str, str]
    ) -> dict[str, float]:
        """What a run that only evaluates tells of the model in the folder, by the data of `planned`
        even if more has come since."""
        asked = with_adapter(only_evaluating(going_on(self.run, folder, folders)))
        step = trained_on(asked, planned)
        # How much is evaluated is no part of the key of a run that nothing depends on.
        limit: list[Any] = [asked.train.eval_max_batches]
        if asked.train.eval_rows_per_batch is not None:
            limit.append(asked.train.eval_rows_per_batch)
        rows = short(digest_json([stage_key(step.stage), *limit]))
        asked = with_output(asked, EVALUATIONS, rows)
        steps = (planned.step("prepare"), planned.step("pack"), trained_on(asked, planned))
        facts = self.bring(Plan(asked, steps), "train").facts
        return {name: value for name, value in facts.items() if name.startswith("eval_")}

    def _is_there_already(self, export: PlannedStage) -> int | None:
        """The release that is this export, among the latest and those that are withdrawn."""
        made = sealed(export)
        if made and find_cached(export) is None:
            return None  # stale: it was made from a result that was built again since
        key, content = stage_key(export.stage), content_digest(made) if made else None
        numbers = {*self.shelf.withdrawn, *([self.latest] if self.latest else [])}
        for number in sorted(numbers & set(self.shelf.numbers()), reverse=True):
            if is_release_from(self.shelf.manifest(number), key, content):
                return number
        return None

    def _folder_of(self, number: int) -> Path:
        return verified_folder(self.shelf, number, self.run.pipeline.verify)

    def _known(self) -> "SeenSamples":
        from penstock.prepare.select.seen_samples import SeenSamples  # noqa: PLC0415

        assert self.latest
        return SeenSamples.read(self._folder_of(self.latest), self.released["facts"]["data_files"])

    def _all_known(self, planned: Plan, start: int | None) -> "SeenSamples":
        """The samples of this data, and of the releases that training went on from."""
        from penstock.prepare.select.seen_samples import known_in  # noqa: PLC0415

        prepared = planned.step("prepare").path
        if start is None:
            return known_in(prepared)
        before = self._known()
        return before | known_in(prepared, before.files)

    def _asked(self) -> str:
        delta = self.wish.min_delta
        return f", and release.min_delta is {delta:g}" if delta and self.latest else ""

    def _tidy(self, mine: str) -> None:
        """Delete the folders of earlier models beyond `release.keep_runs`."""
        if self.wish.keep_runs is None:
            return
        output = self.run.train.output_dir
        decided = [each["keys"]["train"] for each in self.shelf.decisions() if each.get("keys")]
        newest_first = list(dict.fromkeys([mine, *reversed(decided)]))
        is_here = RemotePath.of(output).names() if is_url(output) else set(newest_first)
        for key in newest_first[self.wish.keep_runs :]:
            if key not in is_here or not KEY.fullmatch(key):
                continue
            folder = local_cache_dir(below(output, key))
            if is_url(output):
                RemoteArtifact(below(output, key), folder).delete()
            elif (read_manifest(folder) or {}).get("stage") != "train":
                continue
            remove(folder)
            remove(lock_path(folder))


@contextmanager
def _alone(run: RunConfig) -> Generator[bool]:
    """Whether no other tick of this release is at work on this machine, while the block runs."""
    folder = local_cache_dir(release_location(run))
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / AT_WORK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _told(figures: Figures, latest: int | None) -> str:
    """Both numbers, and whose they are."""
    told = f"{figures.metric} of the new model is {figures.new:.6g}"
    if figures.released is not None and latest:
        told += f", of {release_folder_name(latest)} {figures.released:.6g}"
    return told


def _finite(value: Any) -> Any:
    """The value with numbers that JSON does not know as text."""
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
