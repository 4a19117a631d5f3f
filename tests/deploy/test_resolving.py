"""What an index resolves for the wheel works, without constraints: the newest and the oldest of
all that pyproject.toml allows. Only torch is the version that is installed here."""

import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.conftest import ROOT
from tests.deploy.installed import PIP, build_wheel, environment, require_server, run_penstock

TESTS = (
    "tests/config/test_load.py",
    "tests/core/test_verify.py",
    "tests/engine/distributed/test_weights.py",
    "tests/flows/test_scripts.py",
    "tests/server/api/test_api.py",
    "tests/server/workers/test_wire.py",
    "tests/stages/prepare/test_formats_columns.py",
    "tests/stages/prepare/test_own_files.py",
    "tests/stages/prepare/test_prepare_input.py",
)
"""Files of tests that need no package of the extra `dev` but pytest's own."""

FOR_TESTS = ("pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.8", "hypothesis>=6", "httpx")

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(3600)]


def lower_bounds() -> list[str]:
    """The oldest version of each dependency, and of what a server needs, that is allowed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: list[str] = []
    for text in [*project["dependencies"], *project["optional-dependencies"]["server"]]:
        needed = Requirement(text)
        [least] = [each.version for each in needed.specifier if each.operator == ">="]
        if needed.name != "torch":
            found.append(f"{needed.name}=={least}")
    return found


def pip(python: Path, *words: str) -> None:
    done = subprocess.run(
        [python, *PIP, *words], capture_output=True, text=True, check=False, timeout=1800
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module", params=["newest", "oldest"])
def python(request, tmp_path_factory) -> Path:
    """An interpreter for which pip has resolved the wheel with the extra `server`."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp(request.param)
    asked = [sys.executable, *PIP, "download", "--no-deps", "-d", str(folder / "asked"), "tqdm"]
    if subprocess.run(asked, capture_output=True, check=False, timeout=120).returncode:
        pytest.skip("no package index can be reached")
    wheel = build_wheel(folder)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    pip(python, "install", f"torch=={version('torch').partition('+')[0]}")
    bounds = folder / "bounds.txt"
    bounds.write_text("\n".join(lower_bounds() if request.param == "oldest" else ()))
    pip(python, "install", "-c", str(bounds), f"{wheel}[server]", *FOR_TESTS)
    pip(python, "check")
    return python


def test_a_new_user_can_go_from_the_recipe_to_an_answer(python, tmp_path):
    def penstock(*words: str) -> str:
        return run_penstock(python, tmp_path, *words, HOME=str(tmp_path))

    assert "Any field of the config" in penstock("--help")
    penstock("init", "quickstart")
    penstock("check", "quickstart.yaml")
    penstock("run", "quickstart.yaml", "--train.max_steps", "2")
    told = penstock("flow", "quickstart.yaml", "--train.max_steps", "2")
    assert told.count(" cached ") == 4
    asked = ("--prompt", "2 + 2", "--max-new-tokens", "4", "--json")
    assert '"answers"' in penstock("chat", "quickstart.yaml", "--train.max_steps", "2", *asked)


def test_a_training_server_becomes_ready(python, tmp_path):
    require_server(python, tmp_path)


def test_tests_of_each_part_pass(python):
    words = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(
        [python, *words],
        cwd=ROOT,
        env=environment(PYTHONDONTWRITEBYTECODE="1"),
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
