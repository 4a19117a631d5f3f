"""Penstock under every Python of this machine, from 3.11."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.core.machine.linux import child_processes
from tests.conftest import ROOT
from tests.deploy.installed import PIP, build_wheel, environment, run_penstock
from tests.deploy.interpreters import interpreters
from tests.waiting import soon

PYTHONS = interpreters()
OVERRIDES = ("--train.max_steps", "40", "--train.save_steps", "2", "--data.val_set_size", "20")

COMPILE = """
import sys
from pathlib import Path
for root in sys.argv[1:]:
    for file in Path(root).rglob("*.py"):
        compile(file.read_text(encoding="utf-8"), str(file), "exec", dont_inherit=True)
"""

IMPORT = """
import sys
from importlib import import_module
from pathlib import Path
sys.path[:0] = sys.argv[1:]
root, imported = Path(sys.argv[1]), 0
for file in sorted(root.glob("penstock/co[rn]*/**/*.py")):
    try:
        import_module(".".join(file.relative_to(root).with_suffix("").parts))
        imported += 1
    except ModuleNotFoundError as error:
        assert not error.name.startswith("penstock"), error
print(imported)
"""


def python(file: Path, code: str, *words: object) -> str:
    """What isolated code prints, of which no warning may come."""
    done = subprocess.run(
        [file, "-I", "-B", "-W", "error", "-c", code, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("version", PYTHONS)
def test_every_source_compiles_and_what_needs_no_package_can_be_imported(version):
    roots = [ROOT / name for name in ("stages", "kernels", "flows")]
    python(PYTHONS[version], COMPILE, *roots)
    assert int(python(PYTHONS[version], IMPORT, ROOT / "stages")) > 50


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    pytest.importorskip("hatchling")
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The interpreter of an environment of that version, with the wheel and all it needs."""
    folder = tmp_path_factory.mktemp("environments")
    asked = [sys.executable, *PIP, "download", "--no-deps", "-d", str(folder), "tqdm"]
    if subprocess.run(asked, capture_output=True, check=False, timeout=120).returncode:
        pytest.skip("no package index can be reached")

    def install(version: str) -> Path:
        file = folder / version / "bin/python"
        if not file.exists():
            subprocess.run([PYTHONS[version], "-m", "venv", str(folder / version)], check=True)
            words = [*PIP, "install", "-c", str(ROOT / "constraints.txt"), str(wheel)]
            subprocess.run([file, *words], check=True, cwd=folder, timeout=1500)
        return file

    yield install
    shutil.rmtree(folder)


def run_until_killed(file: Path, folder: Path, step: int) -> None:
    """Start the run in `folder`; kill -9 of all its processes once step `step` is saved."""
    command = [str(file), "-m", "penstock.cli.main", "run", "quickstart.yaml", *OVERRIDES]
    with (folder / f"killed_at_{step}.log").open("wb") as log:
        running = subprocess.Popen(command, cwd=folder, env=environment(), stdout=log, stderr=log)
    mark = folder / f"outputs/quickstart/checkpoints/global_step_{step}/COMPLETE"
    try:
        soon(lambda: mark.exists() or running.poll() is not None, 200)
    finally:
        pids = [running.pid]
        for pid in pids:
            pids += child_processes(pid)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        running.wait()
    assert mark.exists(), Path(log.name).read_text()


def steps(folder: Path) -> list[int]:
    lines = (folder / "outputs/quickstart/metrics.jsonl").read_text().splitlines()
    return [record["step"] for record in map(json.loads, lines) if "loss" in record]


def finish(file: Path, folder: Path) -> None:
    text = run_penstock(file, folder, "run", "quickstart.yaml", *OVERRIDES)
    assert re.search(r"train +\w+ +resumed", text), text
    assert steps(folder) == list(range(1, 41))
    assert (folder / "outputs/quickstart/hf/model.safetensors").is_file()
    print(*re.findall(r"^train +\d+ steps.*", text, re.M))


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", PYTHONS)
def test_an_installed_wheel_trains_is_killed_resumes_and_exports(installed, version, tmp_path):
    file = installed(version)
    assert "Any field of the config" in run_penstock(file, tmp_path, "--help")
    run_penstock(file, tmp_path, "init", "quickstart")
    run_until_killed(file, tmp_path, 4)
    finish(file, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_a_run_goes_on_under_each_of_the_other_pythons(installed, tmp_path):
    files = [installed(version) for version in PYTHONS]
    run_penstock(files[0], tmp_path, "init", "quickstart")
    # There and back: the newest one reads what the oldest one wrote, and the other way round.
    order = [*files, *reversed(files)]
    for number, file in enumerate(order[:-1], 1):
        run_until_killed(file, tmp_path, 2 + 2 * number)
    finish(order[-1], tmp_path)
