"""Models that are trained again as their sources grow, and released where they are better."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock

from penstock.config.loading.load import load
from penstock.core.cache.digest_cache import sha256_file
from penstock.core.cache.manifest import MANIFEST
from penstock.core.cache.store import StageResult
from penstock.core.errors import StageError
from penstock.core.files import read_json, remove
from penstock.core.releases.local import LocalReleaseStore
from penstock.core.remote.local_mirror import local_cache_dir
from penstock.core.remote.path import RemotePath
from penstock.pipeline import recurring
from penstock.pipeline.plan import RebuildOptions, execute_stage, plan
from penstock.pipeline.recurring import LOCK_FILE, tick
from penstock.pipeline.releasing import open_releases, roll_back
from tests.cli.command import penstock
from tests.engine import runs
from tests.pipeline.runs import write_chats, write_run
from tests.ranks import on_ranks
from tests.turns import one_day_in

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.usefixtures("warm_ranks")]


def recurring_run(folder: Path, **sections) -> Path:
    """A run over all files in `folder/data`, judged by rows that stay the same."""
    (folder / "data").mkdir(parents=True)
    write_chats(folder / "data" / "a.jsonl", 24)
    write_chats(folder / "held-out.jsonl", 8, salt=" exactly")
    data = {
        "datasets": [{"path": str(folder / "data"), "type": "chat"}],
        "test_datasets": [{"path": str(folder / "held-out.jsonl"), "type": "chat"}],
        "dataset_prepared_path": str(folder / "prepared"),
        "val_set_size": None,
    }
    release = {"name": "bot", **sections.pop("release", {})}
    train = {"num_train_epochs": 1, "lr": 0.003, "save_hf_weights": False}
    train |= sections.pop("train", {})
    return write_run(folder, data=data, train=train, release=release, **sections)


class Story:
    """Ticks of one config on this rank, with a note of every stage that was brought up."""

    def __init__(self, config: Path) -> None:
        self.config = config
        self.brought: list[tuple[str, str]] = []
        self.breaks_before: str | None = None
        self.meanwhile: dict[str, Callable[[], object]] = {}

    def tick(self, **wishes):
        """What a tick decided, and what became of the stages that it asked for."""
        self.brought = []
        run = load(self.config)
        run = run.model_copy(update={"release": run.release.model_copy(update=wishes)})
        return tick(run, self.bring, lambda _: None).as_json() | {"brought": self.brought}

    def bring(self, planned, name):
        step = planned.step(name)
        kind = name
        if name == "train":
            step = replace(step, stage=replace(step.stage, ranks="this_process"))
            kind = "evaluate" if planned.run.train.eval_only else "train"
        if kind == "train":
            self.origin = step.stage.origin
        if kind == self.breaks_before:
            raise KeyboardInterrupt
        outcome = execute_stage(step, planned.run, RebuildOptions(), lambda _: None)
        self.meanwhile.get(kind, lambda: None)()
        self.brought.append((kind, outcome.status))
        return outcome

    @property
    def shelf(self):
        return open_releases(load(self.config))


def interrupted(*_):
    raise KeyboardInterrupt


def grows(folder):
    """A folder that gains files, and what every look at it led to."""
    config = recurring_run(folder)
    story, seen = Story(config), {}
    seen["first"] = story.tick()
    before = {
        path: sha256_file(path) for path in (folder / "artifacts/releases").rglob("*.safetens*")
    }
    seen["nothing new"] = story.tick()
    write_chats(folder / "data" / "b.jsonl", 16, salt=" twice")
    write_chats(folder / "data" / "c.jsonl", 5)  # said in a.jsonl already
    seen["too little"] = story.tick(min_new_samples=17)
    story.breaks_before = "evaluate"
    with pytest.raises(KeyboardInterrupt):
        story.tick()
    story.breaks_before = None
    seen["grown"] = story.tick()
    seen["pointed to"] = str((folder / "artifacts/releases/bot/latest").readlink())
    roll_back(story.shelf, None, lambda _: None)
    seen["rolled back"] = story.tick()
    roll_back(story.shelf, 2, lambda _: None)
    seen["rolled forward"] = story.tick()
    write_chats(folder / "data" / "d.jsonl", 16, salt=" halved")
    remove(folder / "artifacts" / "export")
    seen["not enough better"] = story.tick(min_delta=50.0, keep_runs=1)
    seen["asked again"] = story.tick(min_delta=50.0)
    seen["paused"] = story.tick(train_when="never")
    story.breaks_before = "train"
    with pytest.raises(KeyboardInterrupt):
        story.tick(start_from="model")
    seen["anew"] = story.origin.model_path
    story.breaks_before = None
    with FileLock(folder / "artifacts/releases/bot" / LOCK_FILE):
        seen["two at once"] = story.tick(metric=None)
    (folder / "data" / "e.jsonl").touch()
    with pytest.raises(StageError, match=r"e\.jsonl is empty"):
        story.tick()
    (folder / "data" / "e.jsonl").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalReleaseStore, "set_latest", interrupted)
        with pytest.raises(KeyboardInterrupt):
            story.tick(metric=None)
    story.meanwhile["export"] = lambda: roll_back(story.shelf, 1, lambda _: None)
    seen["overtaken"] = story.tick(metric=None)
    story.meanwhile["export"] = lambda: None
    roll_back(story.shelf, 2, lambda _: None)
    seen["not compared"] = story.tick(metric=None)
    write_chats(folder / "data" / "d.jsonl", 15, salt=" halved")
    seen["less"] = story.tick()
    story.breaks_before = "train"
    with pytest.raises(KeyboardInterrupt):
        story.tick(train_when="always")
    return seen, before


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grown")
    [(seen, before)] = on_ranks(1, grows, folder, timeout=240)
    return folder, seen, before


def verdict(seen):
    return seen["verdict"], seen["release"], seen["new_samples"]


def test_a_model_is_trained_again_when_enough_is_new_and_only_then(grown):
    _, seen, _ = grown
    assert verdict(seen["first"]) == ("released", 1, 24)
    assert verdict(seen["nothing new"]) == ("up_to_date", 1, 0)
    assert seen["nothing new"]["brought"] == []
    assert verdict(seen["too little"]) == ("waiting", 1, 16)
    assert seen["too little"]["brought"] == [("prepare", "ran")]
    assert verdict(seen["grown"]) == ("released", 2, 16)
    assert verdict(seen["paused"]) == ("paused", 2, 16)
    assert verdict(seen["less"]) == ("up_to_date", 3, 0)  # though its data is another


def test_a_look_that_finds_nothing_new_needs_no_heavy_library(grown):
    folder, _, _ = grown
    write_chats(folder / "data" / "d.jsonl", 16, salt=" halved")  # as it was for the release
    code = (
        "import sys\n"
        "from penstock.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'transformers', 'prefect', 'datasets', 'pyarrow', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", code, "recur", str(folder / "run.yaml")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said == ["bot stays at 0003: nothing is new", "[]"]


def test_slices_of_before_are_reused_and_counted(grown):
    _, seen, _ = grown
    assert (seen["first"]["slices"], seen["first"]["reused_slices"]) == (2, 0)
    assert (seen["too little"]["slices"], seen["too little"]["reused_slices"]) == (4, 2)
    assert seen["nothing new"]["slices"] is None


def test_a_tick_that_was_broken_off_is_taken_up_where_it_was(grown):
    _, seen, _ = grown
    stages = Counter(seen["grown"]["brought"])
    assert stages[("train", "cached")] == stages[("export", "cached")] == 1
    assert stages[("evaluate", "ran")] == 2


def test_the_new_model_went_on_from_the_released_one(grown):
    folder, _, _ = grown
    second = read_json(folder / "artifacts/releases/bot/0002" / MANIFEST)
    assert second["facts"]["started_from"] == 1
    weights = second["facts"]["base"]["weights"]["source"]["files"]
    [file] = [each for each in weights if each["name"].endswith(".safetensors")]
    first = folder / "artifacts/releases/bot/0001/hf/model.safetensors"
    assert file["sha256"] == sha256_file(first)
    assert grown[1]["anew"] is None  # with start_from: model


def test_both_models_are_compared_on_the_same_rows_and_the_better_one_stays(grown):
    _, seen, _ = grown
    figures = seen["grown"]["figures"]
    assert figures["new"] < figures["released"]
    assert seen["first"]["figures"]["new"] == pytest.approx(figures["released"], abs=1e-9)
    kept = seen["not enough better"]
    assert verdict(kept) == ("kept", 2, 16)
    for number in (kept["figures"]["new"], kept["figures"]["released"]):
        assert f"{number:.6g}" in kept["line"]
    assert "release.min_delta is 50" in kept["line"]
    again = Counter(seen["asked again"]["brought"])
    assert {status for _, status in again} == {"cached"}
    released = seen["not compared"]
    assert verdict(released) == ("released", 3, 16)
    assert released["figures"] is None
    assert "evaluate" not in dict(released["brought"])


def test_evaluations_of_more_or_other_rows_are_not_taken_for_each_other(tmp_path):
    config = recurring_run(tmp_path)
    runs.write_config(tmp_path / "exported/hf")
    folders = []

    def bring(planned, name):
        folders.append(planned.run.train.output_dir)
        return StageResult(name, "key", "ran", tmp_path, 0.0, {"eval_loss": 1.0, "steps": 0})

    two = {"eval_max_batches": 2}
    for limit in ({}, two, {"eval_max_batches": 1}, {**two, "eval_rows_per_batch": 2}):
        run = load(config)
        run = run.model_copy(update={"train": run.train.model_copy(update=limit)})
        looking = recurring._Tick(run, open_releases(run), bring, lambda _: None)
        args = (plan(run, ("train",)), tmp_path / "exported", {"hf": "hf"})
        assert looking._evaluate(*args) == {"eval_loss": 1.0}
        looking._evaluate(*args)
    assert folders[::2] == folders[1::2]
    assert len(set(folders)) == 4


def test_the_pointer_follows_releases_and_rollbacks(grown):
    folder, seen, _ = grown
    assert seen["pointed to"] == "0002"
    back = seen["rolled back"]
    assert (back["verdict"], back["release"]) == ("kept", 1)
    assert "0002, which is withdrawn" in back["line"]
    assert back["brought"] == [("prepare", "cached")]
    assert verdict(seen["rolled forward"]) == ("up_to_date", 2, 0)
    shelf = LocalReleaseStore(folder / "artifacts/releases/bot")
    assert (shelf.latest(), shelf.numbers(), shelf.withdrawn) == (3, [1, 2, 3], set())
    told = [each["verdict"] for each in shelf.decisions()]
    assert told[:4] == ["released", "up_to_date", "waiting", "released"]
    assert seen["two at once"]["verdict"] == "busy"
    assert seen["two at once"]["brought"] == []
    assert told.count("failed") == 1


def test_a_model_is_not_released_over_one_that_it_was_not_compared_with(grown):
    _, seen, _ = grown
    overtaken = seen["overtaken"]
    assert (overtaken["verdict"], overtaken["release"]) == ("kept", 1)
    assert "0001 was released meanwhile" in overtaken["line"]


def test_a_release_that_was_not_pointed_to_when_its_process_died_is_not_made_twice(grown):
    folder, seen, _ = grown
    assert seen["not compared"]["release"] == 3
    assert LocalReleaseStore(folder / "artifacts/releases/bot").numbers() == [1, 2, 3]


def test_a_release_outlives_the_export_it_was_made_of(grown):
    folder, _, before = grown
    assert before
    assert {path: sha256_file(path) for path in before} == before
    assert penstock("releases", "verify", folder / "run.yaml", "--json").last["verified"] == [
        1,
        2,
        3,
    ]


def test_the_command_lists_shows_and_rolls_back(grown):
    folder, seen, _ = grown
    where = folder / "artifacts/releases/bot"
    listed = penstock("releases", "list", where)
    assert f"eval_loss {seen['grown']['figures']['new']:.6g} (before: " in listed.out
    assert [row.split()[:2] for row in listed.out.splitlines()[-1:]] == [["latest", "0003"]]
    shown = penstock("releases", "show", folder / "run.yaml", 2, "--json").last
    assert shown["path"] == str(where / "0002")
    assert shown["manifest"]["facts"]["data"]["rows"]["train"] == 45
    back = penstock("releases", "rollback", folder / "run.yaml", "--json").last
    assert (back["before"], back["latest"]) == (3, 2)
    assert str((where / "latest").readlink()) == "0002"
    assert "points to 0002; it pointed to 0003" in penstock("releases", "show", where).out
    penstock("releases", "rollback", where, "--to", 3)


def test_what_a_release_was_made_from_is_not_pruned(grown):
    folder, seen, _ = grown
    prune = ("artifacts", "prune", "--root", folder, "--unreferenced", "--keep-last", 0)
    gone = penstock(*prune, "--dry-run", "--json").last["pruned"]
    assert [Path(path).parent.name for path in gone] != []
    needed = {
        each["keys"][stage]
        for each in (seen["first"], seen["grown"], seen["not compared"])
        for stage in ("prepare", "pack", "export")
    }
    assert {Path(path).name for path in gone} & needed == set()


def test_training_folders_of_earlier_models_go_where_few_are_kept(grown):
    folder, seen, _ = grown
    left = {path.name for path in (folder / "out").iterdir() if path.is_dir()} - {"evaluations"}
    assert left == {seen["not enough better"]["keys"]["train"]}


def goes_on(folder, url):
    """Two ticks of a run of adapters whose artifacts lie behind a URL, what the second one started
    from, and what the store holds then."""
    config = recurring_run(
        folder,
        lora={"enable_lora": True, "lora_rank": 2, "lora_target_modules": ["q_proj", "down_proj"]},
        release={"metric": "eval_token_accuracy"},
        pipeline={"artifacts_path": url},
        push={"url": f"file://{folder}/pushed"},
    )
    story = Story(config)
    story.meanwhile["train"] = lambda: write_chats(folder / "data/b.jsonl", 16, salt=" twice")
    first = story.tick()
    files = set(RemotePath.from_url(f"{url}/releases/bot").files())
    return first, files, story.tick(), story.origin


@one_day_in(3, of=2)
def test_adapters_go_on_from_the_released_adapter_beside_the_same_base(tmp_path):
    url = f"memory://{tmp_path.name}/made"
    [told] = on_ranks(1, goes_on, tmp_path / "run", url, timeout=240)
    first, files, second, origin = told
    assert (first["verdict"], first["release"]) == ("released", 1)
    assert {"latest.json", "0001/manifest.json", "0001/adapter/adapter_model.safetensors"} < files
    assert (tmp_path / "run/pushed/adapter/adapter_config.json").is_file()
    assert origin.adapter_path == str(local_cache_dir(f"{url}/releases/bot") / "0001" / "adapter")
    assert (origin.model_path, origin.config_path) == (None, "builtin:tiny-qwen3")
    assert (second["new_samples"], second["reused_slices"]) == (16, 2)  # they came meanwhile
    figures = second["figures"]
    assert figures["released"] == first["figures"]["new"]  # more of it is better
    assert second["verdict"] == ("released" if figures["new"] > figures["released"] else "kept")
    names = {"eval_loss", "eval_perplexity", "eval_token_accuracy"}
    assert figures["all_of_new"].keys() == figures["all_of_released"].keys() == names
