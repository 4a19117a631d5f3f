"""Which Python `make install` makes the environment with, and what it says where none fits."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.turns import one_day_in

PINNED = re.findall(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.M)[0]
VERSION = "{}.{}.{}".format(*sys.version_info)
PROGRAMS = ("sh", "sed", "tr", "grep", "rm", "dirname")

SHIM = "echo 'the command exists in these versions' >&2; exit 127"
OLD = """case "$2" in *%d.%d.%d*) echo '3.10.4 /usr' ;; *) exit 1 ;; esac"""
BARE = f"""case "$2" in *ensurepip*) exit 1 ;; *) exec {sys.executable} "$@" ;; esac"""
WHOLE = f"""exec {sys.executable} "$@" """


@pytest.fixture
def make_venv(tmp_path):
    """Run the script with these programs alone in PATH, and these wheels alone in the index."""

    def run(*words: str, torch: str = PINNED, **pythons: str) -> subprocess.CompletedProcess[str]:
        for folder in ("bin", "wheels"):
            shutil.rmtree(tmp_path / folder, ignore_errors=True)
            (tmp_path / folder).mkdir()
        for name in PROGRAMS:
            (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
        for name, text in pythons.items():
            file = tmp_path / "bin" / name.replace("_", ".")
            file.write_text(f"#!/bin/sh\n{text}\n")
            file.chmod(0o755)
        (tmp_path / "wheels" / f"torch-{torch}-py3-none-any.whl").touch()
        script = [str(tmp_path / "bin/sh"), str(ROOT / "deploy/make_venv.sh")]
        return subprocess.run(
            [*script, str(tmp_path / "venv"), *words],
            env={
                "PATH": str(tmp_path / "bin"),
                "PIP_NO_INDEX": "1",
                "PIP_FIND_LINKS": str(tmp_path / "wheels"),
            },
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.mark.parametrize(
    ("pythons", "expected"),
    [
        ({}, "it is missing or does not run"),
        ({"python3_13": SHIM}, "it is missing or does not run"),
        ({"python3": OLD}, "python3 is Python 3.10.4, and 3.11 or later is needed"),
        ({"python3": BARE}, f"python3 is Python {VERSION} without the module venv or ensurepip"),
    ],
)
def test_where_no_python_fits_one_line_says_why(make_venv, tmp_path, pythons, expected):
    done = make_venv(**pythons)
    assert done.returncode == 1
    assert expected in done.stderr
    assert len(done.stderr.splitlines()) == 1
    if BARE in pythons.values() and Path("/etc/debian_version").exists():
        assert f"apt install python{VERSION.rpartition('.')[0]}-venv" in done.stderr
    assert not (tmp_path / "venv").exists()


@one_day_in(3, of=2)
def test_the_newest_python_with_a_wheel_of_torch_is_taken_and_stays(make_venv, tmp_path):
    python = tmp_path / "venv/bin/python"
    done = make_venv(python3=WHOLE, torch="1.0")
    assert f"no wheel of torch {PINNED} for python3, Python {VERSION}" in done.stderr
    assert not python.exists()
    done = make_venv(python3_14=SHIM, python3_12=BARE, python3_11=WHOLE, python3=OLD)
    assert done.stdout == f"{tmp_path}/venv: Python {VERSION} ({tmp_path}/bin/python3.11)\n"
    (tmp_path / "venv/stays").touch()
    assert make_venv(python3_14=WHOLE).returncode == 0
    assert make_venv("python3.11", python3_11=WHOLE).returncode == 0
    assert "PYTHON is nowhere; it is missing" in make_venv("nowhere").stderr
    assert (tmp_path / "venv/stays").exists()


def test_make_installs_again_for_another_python(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    (tmp_path / ".installed").touch()

    def commands(python: str) -> str:
        words = ["make", "-n", f"VENV={tmp_path}", f"PYTHON={python}", "install"]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    other = tmp_path / "other"
    other.write_text("#!/bin/sh\necho another\n")
    other.chmod(0o755)
    for python in ("", sys.executable):
        assert "make_venv.sh" not in commands(python)
    assert f"make_venv.sh {tmp_path} {other}" in commands(str(other))
