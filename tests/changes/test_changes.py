"""A change to what a run reads, or to what it made, is noticed before it enters a result.

Every kind of change is made to every file: the stage that reads the file is not `cached` then, or
an error names the file. What leaves the content as it was is not noticed, and nothing runs again.
The same changes are made between plan and run: the stage has no result, and once the change is
taken back it has the bytes that it has where nothing happened, as nothing of the other content is
in a cache. By default a few cases are drawn; their seed is printed with a failure.
"""

import os
import random
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import product
from pathlib import Path

import pytest

from penstock.config.loading.cli_overrides import Override
from penstock.config.loading.load import load
from penstock.core.cache import digest_cache
from penstock.core.cache.manifest import MANIFEST, content_digest, read_manifest
from penstock.core.cache.record import with_digest
from penstock.core.cache.store import PlannedStage, get_or_build
from penstock.core.errors import PenstockError
from penstock.core.files import read_json, write_json
from penstock.pipeline.plan import plan
from penstock.prepare import workers
from tests.changes import worlds
from tests.changes.kinds import (
    CHANGES,
    NEUTRAL,
    beside,
    copy,
    delete,
    hidden,
    set_back,
    undone,
    without_override,
)
from tests.changes.worlds import SEED, Target, World, step_of
from tests.cli.command import penstock
from tests.ranks import on_ranks

pytestmark = pytest.mark.usefixtures("warm_ranks")

DRAWN = 15


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> World:
    made = World(tmp_path_factory.mktemp("world"))
    config, targets = worlds.text_run(made.folder / "text")
    made.add(config, targets)
    return made


@pytest.fixture(scope="module")
def every(text) -> World:
    """All runs."""
    for name, write in (("pairs", worlds.pairs_run), ("pictures", worlds.pictures_run)):
        text.add(*write(text.folder / name))
    text.add(*worlds.start_run(text.folder / "start", text.folder / "text"), is_built=False)
    return text


def cases(world: World) -> list[tuple[Target, str]]:
    """Of the files that are not empty."""
    full = [target for target in world.targets if target.path.stat().st_size]
    return [*product(full, [*CHANGES, *NEUTRAL])]


@pytest.mark.slow
@pytest.mark.dist
def test_drawn_changes_are_noticed_and_what_changes_nothing_is_not(text):
    for target, kind in random.Random(SEED).sample(cases(text), DRAWN):
        text.check(target, kind)


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_every_change_to_every_file_is_noticed(every, capsys):
    counts = Counter[tuple[str, str]]()
    for target, kind in cases(every):
        counts[kind, every.check(target, kind)] += 1
    with capsys.disabled():
        print(f"\nseed {SEED}, {len(every.targets)} files")
        for (kind, became), count in sorted(counts.items()):
            print(f"{kind:24}{became:14}{count:6}")
    assert sum(count for (kind, _), count in counts.items() if kind in CHANGES) >= 400


def of_stage(world: World, stage: str, suffix: str = "") -> Target:
    """A file of the stage's result."""
    return next(t for t in world.targets if t.name.startswith(stage) and t.name.endswith(suffix))


def named(world: World, name: str) -> Target:
    return next(target for target in world.targets if target.name == name)


RESULTS = ("prepare", "pack", "train", "export", "push")


@pytest.mark.dist
def test_files_that_no_manifest_lists_are_not_read_and_added_inputs_are(text):
    for stage in RESULTS:
        target = of_stage(text, stage, ".arrow" if stage in ("prepare", "pack") else "")
        with undone(target.path):
            beside(target.path, target.path.read_bytes()).rename(
                target.path.with_name(f"rows-9{target.path.suffix}")
            )
            text.judge(target, "extra file", is_neutral=True)
    for name, extra, is_neutral in (
        ("data/h/one.jsonl", "three.jsonl", False),
        ("data/h/one.jsonl", "README.md", True),
        ("model/config.json", "more.safetensors", False),
        ("model/config.json", "notes.md", True),
        ("model/tokenizer.json", "added_tokens.json", False),
        ("model/tokenizer.json", "tekken.json", False),
    ):
        target = named(text, name)
        with undone(target.path):
            source = named(text, "data/a.jsonl").path
            source = target.path.parent / "model.safetensors" if "safe" in extra else source
            source = source if source.exists() else named(text, "data/a.jsonl").path
            copy(source, target.path.with_name(extra))
            text.judge(target, f"extra {extra}", is_neutral=is_neutral)


@pytest.mark.dist
def test_a_whole_folder_that_is_exchanged_is_noticed(text):
    for stage in RESULTS:
        target = of_stage(text, stage, ".arrow" if stage in ("prepare", "pack") else "")
        folder = step_of(target.config, stage).path
        with undone(folder):
            other = hidden(folder, "copy")
            copy(folder, other)
            delete(folder)
            copy(other, folder)
            text.judge(target, "copy of the folder", is_neutral=True)
            file = next(f for f in sorted(folder.rglob("*")) if f.name == target.path.name)
            stat = file.stat()
            CHANGES["flip_in_place"](file, random.Random(SEED))
            set_back(file, stat)
            text.judge(target, "copy with another byte", is_neutral=False)
    config = text.targets[0].config
    prepared, packed = (step_of(config, name).path for name in ("prepare", "pack"))
    with undone(prepared), undone(packed):
        aside = hidden(prepared, "swap")
        prepared.rename(aside)
        packed.rename(prepared)
        aside.rename(packed)
        assert "damaged" in worlds.ask(config).error


@pytest.mark.dist
def test_a_manifest_that_is_edited_is_noticed_though_its_own_digest_fits(text):
    for stage in RESULTS:
        target = of_stage(text, stage, MANIFEST)
        manifest = read_json(target.path)
        with undone(target.path):
            write_json(target.path, {**manifest, "seconds": 0})
            text.judge(target, "a fact edited", is_neutral=False)
        files = [{**manifest["files"][0], "sha256": "0" * 64}, *manifest["files"][1:]]
        for entry in ({"files": files}, {"key": "0" * 64}):
            with undone(target.path):
                write_json(target.path, with_digest({**manifest, **entry}))
                said = worlds.ask(target.config)
                name = Path(manifest["files"][0]["path"]).name
                whole = text.whole[target.config].stages
                is_noticed = said.stages.get(stage) != whole[stage]
                assert is_noticed or name in said.error, (stage, entry)


def zeros(memory: Path) -> None:
    memory.write_bytes(bytes(memory.stat().st_size))


def halved(memory: Path) -> None:
    os.truncate(memory, memory.stat().st_size // 2)


def flipped(memory: Path) -> None:
    content, rng = bytearray(memory.read_bytes()), random.Random(SEED)
    for _ in range(200):
        content[rng.randrange(100, len(content))] ^= 1 << rng.randrange(8)
    memory.write_bytes(content)


def sql(*statements: str) -> Callable[[Path], None]:
    def run(memory: Path) -> None:
        with closing(sqlite3.connect(memory)) as database, database:
            for statement in statements:
                database.execute(statement)

    return run


def of_another_machine(memory: Path) -> None:
    """Well-formed rows of files that bear the numbers of files here, and other digests."""
    with closing(sqlite3.connect(memory)) as database, database:
        for values in database.execute("SELECT * FROM known").fetchall():
            row = digest_cache._Row(*values[:-1])
            other = row._replace(sha256="0" * 64, ctime_ns=row.ctime_ns - 1)
            database.execute("REPLACE INTO known VALUES (?, ?, ?, ?, ?, ?, ?)", other.with_checksum)


MEMORIES: dict[str, Callable[[Path], None]] = {
    "gone": Path.unlink,
    "zeros": zeros,
    "halved": halved,
    "flipped": flipped,
    "no table": sql("DROP TABLE known"),
    "other columns": sql("DROP TABLE known", "CREATE TABLE known (device, inode, sha256)"),
    "digests exchanged": sql("UPDATE known SET sha256 = (SELECT max(sha256) FROM known)"),
    "files exchanged": sql("UPDATE OR REPLACE known SET inode = -inode"),
    "of another machine": of_another_machine,
}


@pytest.mark.dist
def test_a_damaged_or_strange_memory_neither_hides_a_change_nor_shows_one(text):
    rng, memory = random.Random(SEED), digest_cache._database_file()
    full = [target for target in text.targets if target.path.stat().st_size]
    for name, damage in MEMORIES.items():
        target = rng.choice(full)
        worlds.ask(target.config)
        damage(memory)
        text.judge(target, f"memory: {name}", is_neutral=True)
        damage(memory)
        text.check(target, "set_time_back")
        with closing(digest_cache._open_database()) as database:
            assert database.execute("SELECT count(*) FROM known").fetchone()[0], name


@pytest.mark.dist
@pytest.mark.parametrize(
    ("run", "stage", "names"),
    [
        ("text", "train", ["model/config.json", "model/model-00001-of-00003.safetensors"]),
        ("pairs", "reference", ["adapter/adapter_model.safetensors"]),
        ("start", "train", ["start/state.json"]),
    ],
)
@pytest.mark.exhaustive
def test_what_the_ranks_have_loaded_is_what_was_pinned(every, run, stage, names):
    config = next(config for config in every.whole if config.parent.name == run)
    for name in names:
        file = config.parent / name
        step = step_of(config, stage)
        with undone(file), set_aside(step), set_aside_scores(config):
            [said] = on_ranks(1, worlds.bring_changed, config, stage, file)
            assert file.name in said
            assert ("is damaged" if run == "start" else "since this run was planned") in said
            assert not (step.path / MANIFEST).exists()


@contextmanager
def set_aside_scores(config: Path) -> Iterator[None]:
    """No log-probs are known, so that the model is loaded."""
    scores, aside = config.parent / "prepared" / "scores", config.parent / "scores.aside"
    if scores.exists():
        scores.rename(aside)
    try:
        yield
    finally:
        delete(scores)
        if aside.exists():
            aside.rename(scores)


@pytest.mark.dist
def test_the_command_ends_with_the_name_of_a_changed_file_or_with_a_result_of_it(text):
    target = of_stage(text, "pack", ".arrow")
    with undone(target.path):
        CHANGES["copy_over"](target.path, random.Random(SEED))
        said = penstock("run", target.config, "--json")
        assert said.code == 1
        assert target.path.name in said.err
    target = named(text, "data/b.csv")
    with undone(target.path):
        target.path.write_bytes(target.path.read_bytes().replace(b"table 3", b"Table 3"))
        first, again = (penstock("prepare", target.config, "--json").last for _ in range(2))
        assert [first["stages"][0]["status"], again["stages"][0]["status"]] == ["ran", "cached"]
    said = penstock("run", target.config, "--json")
    assert {stage["status"] for stage in said.last["stages"]} == {"cached"}


def check(target: Target, kind: str, planned: PlannedStage, content: str) -> None:
    """Make the change before the stage runs, and take it back before it runs again."""
    case = f"{kind} of {target}, seed {SEED}"
    with undone(target.path), without_override():
        CHANGES[kind](target.path, random.Random(f"{SEED} {kind} {target.name}"))
        require_refused(planned, target, case)
    require_same(planned, content, case)


def require_refused(planned: PlannedStage, target: Target, case: str) -> None:
    try:
        get_or_build(planned)
    except PenstockError as error:
        said = str(error)
    else:
        raise AssertionError(f"not noticed: {case}")
    assert target.path.name in said or str(target.path.parent) in said, f"{case}: {said}"
    assert not (planned.path / MANIFEST).exists(), case


def require_same(planned: PlannedStage, content: str, case: str) -> None:
    assert get_or_build(planned).status in ("ran", "resumed"), case
    assert content_digest(read_manifest(planned.path) or {}) == content, case


def content_of(step: PlannedStage) -> str:
    return content_digest(read_manifest(step.path) or {})


def prepare_elsewhere(config: Path, root: Path) -> PlannedStage:
    """The prepare stage with no result and no slice."""
    run = load(config, [Override("data.dataset_prepared_path", str(root))])
    return plan(run, ("prepare",)).steps[0]


@contextmanager
def set_aside(step: PlannedStage) -> Iterator[PlannedStage]:
    """The step without its result, if it has one, while the block runs."""
    aside = step.path.with_name(f"{step.path.name}.aside")
    if step.path.exists():
        step.path.rename(aside)
    try:
        yield step
    finally:
        delete(step.path)
        if aside.exists():
            aside.rename(step.path)


def prepare_cases(world: World) -> list[tuple[Target, str]]:
    # A template is read when the run is planned, and is part of the plan.
    planned = ("/prepared/", "/templates/")
    read = [
        target
        for target in world.targets
        if target.stage == "prepare" and not any(part in str(target.path) for part in planned)
    ]
    return [(target, kind) for target in read for kind in CHANGES]


@pytest.mark.dist
def test_drawn_changes_between_plan_and_run_are_noticed(text, tmp_path):
    for number, (target, kind) in enumerate(
        random.Random(SEED).sample(prepare_cases(text), DRAWN // 4)
    ):
        content = content_of(step_of(target.config, "prepare"))
        check(target, kind, prepare_elsewhere(target.config, tmp_path / str(number)), content)


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_every_change_between_plan_and_run_is_noticed(text, tmp_path, capsys):
    counts = Counter[str]()
    for number, (target, kind) in enumerate(prepare_cases(text)):
        content = content_of(step_of(target.config, "prepare"))
        check(target, kind, prepare_elsewhere(target.config, tmp_path / str(number)), content)
        counts["prepare"] += 1
    for stage, read in (("pack", "prepare/"), ("export", "train/"), ("export", "model/model-")):
        for target in text.targets:
            if not target.name.startswith(read):
                continue
            if target.path.name == MANIFEST or not target.path.stat().st_size:
                continue
            for kind in CHANGES:
                with set_aside(step_of(target.config, stage)) as step:
                    content = content_digest(
                        read_manifest(step.path.with_name(f"{step.path.name}.aside")) or {}
                    )
                    check(target, kind, step, content)
                counts[f"{stage} of {read}"] += 1
    with capsys.disabled():
        print(f"\nseed {SEED}: {dict(counts)}")


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["set_time_back", "rename_over", "remove"])
@pytest.mark.parametrize("name", ["data/a.jsonl", "data/c.parquet", "model/tokenizer.json"])
def test_what_changes_while_it_is_read_enters_no_result(text, tmp_path, monkeypatch, name, kind):
    [target] = [target for target in text.targets if target.name == name]
    content = content_of(step_of(target.config, "prepare"))
    planned = prepare_elsewhere(target.config, tmp_path)
    with undone(target.path), monkeypatch.context() as patched:
        change = once(lambda: CHANGES[kind](target.path, random.Random(SEED)))
        real = workers.tokenize

        def tokenize(*arguments):
            done = real(*arguments)
            change()
            return done

        patched.setattr(workers, "tokenize", tokenize)
        require_refused(planned, target, kind)
    require_same(planned, content, kind)


def once(act: Callable[[], None]) -> Callable[[], None]:
    left = [act]

    def call() -> None:
        if left:
            left.pop()()

    return call
