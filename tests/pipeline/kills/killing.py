"""SIGKILL at random moments, damage to what it leaves, and running again.

Half of the moments are a time, half the n-th change to a file. After half of the kills, a bit of a
file that the attempt left is flipped, or its end is cut off.
"""

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.cache.manifest import MANIFEST
from penstock.core.files import regular_files
from tests.cli.command import Said
from tests.corruption import flip, truncate
from tests.ranks import RankError, kill_on_ranks, on_ranks

CHANGES = frozenset(
    {
        *("open", "os.link", "os.mkdir", "os.remove", "os.rename"),
        *("os.rmdir", "os.symlink", "os.truncate"),
    }
)
"""Audit events of changes to files; `open` only of files that are opened for writing."""

NAMED = ("ArtifactError", "ConfigError", "DamagedFileError", "StageError")
"""Errors that are told to users as they are."""


@dataclass(frozen=True)
class Scene:
    """What is killed, and how its results are compared."""

    name: str
    root: Path
    """The folder whose changes are counted."""
    fn: Callable[..., Any]
    """Runs to the end on each rank; module-level."""
    args: tuple[Any, ...]
    clear: Callable[[], object]
    """Takes back all that a run has done."""
    content: Callable[[], object]
    """What has to be equal in the end."""
    left: Callable[[], list[Path]]
    """Files of an unfinished attempt."""
    world: int = 1


def unfinished(*roots: Path) -> list[Path]:
    """Files below the roots that belong to no finished result, without locks and empty files."""
    found = []
    for root in roots:
        for path in regular_files(root) if root.is_dir() else ():
            above = path.relative_to(root).parents
            if any((root / folder / MANIFEST).exists() for folder in above):
                continue
            if path.suffix != ".lock" and path.stat().st_size:
                found.append(path)
    return found


def descendants(pid: int) -> list[int]:
    """The process and all below it."""
    found = [pid]
    with suppress(OSError):
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        found += [below for word in words for below in descendants(int(word))]
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def dying(event: int, victims: list[int], root: Path, fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)`, and the number of changes to files. A victim is killed at the change `event`;
    0: at none."""
    is_victim, count = int(os.environ["RANK"]) in victims, 0

    def count_change(name: str, values: tuple[Any, ...]) -> None:
        nonlocal count
        if name not in CHANGES or not isinstance(values[0], str | os.PathLike):
            return
        if name == "open" and not values[2] & (os.O_WRONLY | os.O_RDWR):
            return
        is_below_folder = name in ("os.remove", "os.rmdir") and values[1] != -1  # as rmtree does
        if is_below_folder or str(values[0]).startswith(str(root)):
            count += 1
            if is_victim and count == event:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count_change)
    return fn(*args), count


def damage(rng: random.Random, files: list[Path]) -> Path | None:
    """Flip a bit of one of the files or cut off its end; which one."""
    if not files:
        return None
    path = rng.choice(files)
    rng.choice([flip, truncate])(path, rng)
    return path


def run_to_the_end(scene: Scene) -> tuple[str | None, list[int]]:
    """Its error, and the number of changes on each rank."""
    try:
        ends = on_ranks(scene.world, dying, 0, [], scene.root, scene.fn, *scene.args, timeout=600)
    except RankError as error:
        text = str(error).partition(": ")[2]
        if not text.startswith(NAMED):
            raise
        return text.partition("Traceback")[0], []
    for said, _ in ends:
        if isinstance(said, Said) and said.code:
            assert "Traceback" not in said.err, said.err
            assert "bug in Penstock" not in said.err, said.err
            return said.err, []
    return None, [count for _, count in ends]


def soak(scene: Scene, kills: int, seed: int) -> Counter[str]:
    """Kill it so often, in rounds of one to three kills and a run to the end, which leaves the same
    content or an error that names a file that was damaged."""
    rng, count = random.Random(f"{seed} {scene.name}"), Counter[str]()
    scene.clear()
    assert run_to_the_end(scene)[0] is None
    scene.clear()
    started = time.monotonic()
    error, changes = run_to_the_end(scene)
    assert error is None, error
    lasts, whole = time.monotonic() - started, scene.content()
    assert whole
    begun = time.monotonic()
    while count["kills"] < kills:
        scene.clear()
        log: list[str] = []
        damaged: list[Path] = []
        for _ in range(rng.randint(1, 3)):
            ranks = range(scene.world)
            victims = rng.choice([[rank] for rank in ranks] + [list(ranks)])
            event, after = 0, rng.uniform(0, lasts)
            if rng.random() < 0.5:
                event, after = rng.randint(1, max(1, changes[victims[0]])), 600.0
            args = (event, victims, scene.root, scene.fn, *scene.args)
            hit = kill_on_ranks(scene.world, dying, *args, victims=victims, after=after)
            log.append(f"{victims} at {f'change {event}' if event else f'{after:.3f} s'}: {hit}")
            count["kills"] += hit
            count["at a change to a file"] += hit and bool(event)
            if hit and rng.random() < 0.5 and (path := damage(rng, scene.left())):
                damaged.append(path)
                log.append(f"damaged {path}")
                count["damages"] += 1
        error, _ = run_to_the_end(scene)
        if error is None:
            assert scene.content() == whole, (scene.name, seed, log)
            count["reruns to equal bytes"] += 1
        else:
            assert any(path.name in error for path in damaged), (scene.name, seed, log, error)
            count["errors that name the damaged file"] += 1
    scene.clear()
    assert run_to_the_end(scene)[0] is None
    print(
        f"{scene.name}: seed {seed}, {dict(count)}, undisturbed {lasts:.1f} s and {changes} "
        f"changes, {time.monotonic() - begun:.0f} s in all"
    )
    return count
