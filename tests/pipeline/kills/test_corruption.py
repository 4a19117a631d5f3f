"""No damaged byte of a result is reused, exported or pushed."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.config.loading.load import load
from penstock.config.schema.run import RunConfig
from penstock.core.cache.manifest import MANIFEST, read_manifest
from penstock.core.cache.store import PlannedStage
from penstock.core.errors import PenstockError
from penstock.core.files import remove
from penstock.pipeline.plan import Plan, RebuildOptions, execute_stage, plan
from tests.cli.command import penstock
from tests.corruption import Damage, damaged, damages_of
from tests.pipeline.runs import write_run

SEEDS = 3
"""Places that are flipped, cut and zeroed in each file."""


@dataclass(frozen=True)
class Chain:
    """A finished run, every stage of it there."""

    run: RunConfig
    plan: Plan

    def bring(self, *names: str) -> list[str]:
        """What became of each stage up to the last of `names`."""
        became: list[str] = []
        for step in self.plan.steps:
            became.append(execute_stage(step, self.run, RebuildOptions(), lambda _: None).status)
            if step.stage.name == names[-1]:
                break
        return became

    def files_of(self, *names: str) -> list[Path]:
        """Every file of the results of these stages, their manifests included."""
        found: list[Path] = []
        for step in (self.plan.step(name) for name in names):
            found += [step.path / MANIFEST, *_listed(step)]
        return found


def _listed(step: PlannedStage) -> list[Path]:
    manifest = read_manifest(step.path)
    assert manifest
    return [step.path / file["path"] for file in manifest["files"]]


@pytest.fixture(scope="module")
def chain(warm_ranks, tmp_path_factory) -> Chain:
    del warm_ranks
    folder = tmp_path_factory.mktemp("run")
    train = {"num_train_epochs": 1, "save_steps": 0}
    config = write_run(folder, train=train, push={"url": f"file://{folder}/pushed"})
    assert penstock("run", config).code == 0
    run = load(config, ())
    made = Chain(run, plan(run))
    assert made.bring("push") == ["cached"] * 5
    return made


def corruptions(files: list[Path], seeds: int) -> Iterator[tuple[Path, str, Damage, random.Random]]:
    """Every kind of damage to every file, several times where chance decides what it hits."""
    for path in files:
        others = [other for other in files if other != path and other.suffix == path.suffix]
        for name, damage in damages_of(path, others).items():
            # A folder without a manifest is unfinished, not damaged.
            if path.name == MANIFEST and name == "delete":
                continue
            for seed in range(seeds if name in ("flip", "truncate", "zero") else 1):
                yield path, name, damage, random.Random(f"{path.name} {name} {seed}")


def require_found(path: Path, name: str, attempt: Callable[[], object]) -> None:
    """The attempt fails with an error that names the file, or of a manifest that is another
    result's the folder, and what to do."""
    with pytest.raises(PenstockError) as caught:
        attempt()
    text = str(caught.value)
    named = path.name if name != "replace" else str(path.parent)
    assert named in text, f"{name} of {path}: {text}"
    assert any(word in text for word in ("Restore", "Delete", "delete", "--force", "--fresh")), text


def check_all(chain: Chain, situation: str, seeds: int, *, every: int = 1) -> int:
    """Damage file after file in that situation, and return how often."""
    stages = [step.stage.name for step in chain.plan.steps]
    damaging, asked = {
        "reuse": (stages, "push"),
        "export": (["prepare", "pack", "train"], "export"),
        "push": (["export"], "push"),
    }[situation]
    made = {} if situation == "reuse" else {asked: chain.plan.step(asked)}
    aside = {name: _set_aside(step) for name, step in made.items()}
    count = 0
    try:
        each = list(corruptions(chain.files_of(*damaging), seeds))
        for path, name, damage, rng in each[::every]:
            with damaged(path, damage, rng):
                require_found(path, name, lambda: chain.bring(asked))
            for step in made.values():
                assert not (step.path / MANIFEST).exists(), f"{name} of {path} entered a result"
            count += 1
    finally:
        for name, step in made.items():
            remove(step.path)
            aside[name].rename(step.path)
    assert chain.bring("push") == ["cached"] * 5
    return count


def _set_aside(step: PlannedStage) -> Path:
    aside = step.path.with_name(f"{step.path.name}.aside")
    return step.path.rename(aside)


@pytest.mark.slow
@pytest.mark.parametrize("situation", ["reuse", "export", "push"])
def test_a_damaged_file_is_named_before_it_enters_a_result(chain, situation):
    assert check_all(chain, situation, 1, every=5) > 5


@pytest.mark.exhaustive
@pytest.mark.slow
def test_every_kind_of_damage_to_every_file_is_named_before_it_enters_a_result(chain, capsys):
    counts = {each: check_all(chain, each, SEEDS) for each in ("reuse", "export", "push")}
    with capsys.disabled():
        print(f"\ncorruptions found: {counts}, {sum(counts.values())} in all")
    assert sum(counts.values()) >= 300
