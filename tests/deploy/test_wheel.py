"""The wheel alone, in an environment and a folder where nothing of this repository is."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import httpx
import pytest
import yaml

from tests.conftest import ROOT
from tests.flows.server import Prefect, free_port
from tests.waiting import soon

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """An interpreter that has the wheel; its dependencies are borrowed from this environment."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT)]
    subprocess.run(wheel, check=True, timeout=250)
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True
    )
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "venv" / "lib" / version / "site-packages"
    [file] = folder.glob("*.whl")
    install = [*pip, "install", "--no-deps", "--target", str(packages), str(file)]
    subprocess.run(install, check=True, timeout=120)
    # A plain path: its own .pth files, and so this repository's editable install, stay out.
    libraries = [line for line in sys.path if line.endswith("site-packages")]
    (packages / "libraries.pth").write_text(
        "\n".join(libraries or [sysconfig.get_path("purelib")]) + "\n"
    )
    return folder / "venv" / "bin" / "python"


@pytest.fixture(scope="module")
def prefect(tmp_path_factory):
    server = Prefect(tmp_path_factory.mktemp("prefect"))
    server.start()
    yield server
    server.stop()


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PENSTOCK_HOME")}
    return {**kept, "OMP_NUM_THREADS": "1", "DO_NOT_TRACK": "1", **more}


def test_an_installed_wheel_brings_its_recipes_flows_and_deployments(python, prefect, tmp_path):
    def penstock(*words: str) -> str:
        done = subprocess.run(
            [python, "-m", "penstock.cli.main", *words],
            cwd=tmp_path,
            env=environment(PREFECT_API_URL=f"http://127.0.0.1:{prefect.port}/api"),
            capture_output=True,
            text=True,
            check=False,
            timeout=280,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    where = subprocess.run(
        [python, "-c", "import penstock; print(penstock.__file__)"],
        capture_output=True,
        text=True,
        check=True,
        env=environment(),
    )
    assert not where.stdout.startswith(str(ROOT))
    penstock("init", "quickstart")
    penstock("run", "quickstart.yaml", "--train.max_steps", "2")
    assert (tmp_path / "outputs/quickstart/hf/model.safetensors").is_file()
    told = penstock("flow", "quickstart.yaml", "--train.max_steps", "2")
    assert told.count("cached") == 4
    penstock("deploy", "--pool", "mine")
    written = yaml.safe_load((tmp_path / "prefect.yaml").read_text())
    for one in written["deployments"]:
        assert Path(one["entrypoint"].partition(":")[0]).is_file()
    names = {one["name"]: one["work_pool_name"] for one in prefect.ask("deployments")}
    assert names == dict.fromkeys((one["name"] for one in written["deployments"]), "mine")
    assert "finetune" in names
    assert "is used as it is" in penstock("deploy", "--pool", "mine")


def test_an_installed_wheel_serves(python, tmp_path):
    subprocess.run(
        [python, "-m", "penstock.cli.main", "init", "server-quickstart"],
        cwd=tmp_path,
        env=environment(),
        check=True,
        capture_output=True,
    )
    port = free_port()
    with (tmp_path / "log").open("wb") as log:
        serving = subprocess.Popen(
            [
                *(python, "-m", "penstock.cli.main", "serve", "server-quickstart.yaml"),
                *("--server.api_port", str(port)),
            ],
            cwd=tmp_path,
            env=environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
        )

    def is_ready() -> bool:
        assert serving.poll() is None, (tmp_path / "log").read_text()
        try:
            told = httpx.get(f"http://127.0.0.1:{port}/health", timeout=5)
        except httpx.HTTPError:
            return False
        return told.status_code == 200 and told.json().get("workers") == "ready"

    try:
        soon(is_ready, 120)
    finally:
        serving.terminate()
        serving.wait(60)
