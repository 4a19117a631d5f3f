"""The wheel alone, in an environment and a folder where nothing of this repository is."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT
from tests.deploy.installed import PIP, build_wheel, environment, require_server, run_penstock
from tests.flows.server import Prefect
from tests.turns import one_day_in

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """An interpreter that has the wheel; its dependencies are borrowed from this environment."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    file = build_wheel(folder)
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True
    )
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "venv" / "lib" / version / "site-packages"
    install = [*PIP, "install", "--no-deps", "--target", str(packages), str(file)]
    subprocess.run([sys.executable, *install], check=True, timeout=120)
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


@pytest.mark.exhaustive
def test_an_installed_wheel_brings_its_recipes_flows_and_deployments(python, prefect, tmp_path):
    def penstock(*words: str) -> str:
        api = f"http://127.0.0.1:{prefect.port}/api"
        return run_penstock(python, tmp_path, *words, PREFECT_API_URL=api)

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


@one_day_in(3, of=2)
def test_an_installed_wheel_serves(python, tmp_path):
    require_server(python, tmp_path)
