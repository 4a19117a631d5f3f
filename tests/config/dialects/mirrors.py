"""Takes the config files of other tools out of mirrors of their repositories.

`python -m tests.config.dialects.mirrors MIRRORS OUT`: MIRRORS has a folder `OWNER+NAME` for each
repository, with a bare git repository in `repo`.
"""

import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.config.dialects.notebooks import write_all


@dataclass(frozen=True)
class Project:
    """Where the config files of a tool are."""

    repository: str
    folders: Sequence[str]
    """Paths of a commit; one that it lacks is left out."""
    tags: Sequence[str] = ()
    """Older versions, in folders of their own."""
    is_notebooks: bool = False


LLAMA_FACTORY_DATA = (
    "data/dataset_info.json",
    *(f"data/v1_{name}_demo.yaml" for name in ("dpo", "multimodal", "sft")),
)

PROJECTS = {
    "alignment-handbook": Project(
        "huggingface+alignment-handbook", ["recipes"], ["v0.1.0", "v0.2.0", "v0.3.0"]
    ),
    "axolotl": Project("axolotl-ai-cloud+axolotl", ["examples"]),
    "erniekit": Project("PaddlePaddle+ERNIE", ["examples/configs"]),
    "llama-factory": Project("hiyouga+LLaMA-Factory", ["examples", *LLAMA_FACTORY_DATA]),
    "nxdt": Project("aws-neuron+neuronx-distributed-training", ["examples/conf"]),
    "torchtune": Project("pytorch+torchtune", ["recipes/configs", "recipes/dev"]),
    "trl": Project("huggingface+trl", ["examples", "trl", "tests"]),
    "unsloth": Project("unslothai+notebooks", ["nb", "original_template"], is_notebooks=True),
}

CONFIGS = (".yaml", ".yml", ".json")


def extract(mirrors: Path, out: Path) -> None:
    """Write the files of each project whose mirror is there to a folder of its name."""
    for name, project in PROJECTS.items():
        repository = mirrors / project.repository / "repo"
        if not repository.is_dir():
            continue
        for commit in ("HEAD", *project.tags):
            _extract(repository, commit, project, out / name / ("" if commit == "HEAD" else commit))


def _extract(repository: Path, commit: str, project: Project, target: Path) -> None:
    git = ["git", f"--git-dir={repository}"]
    listing = subprocess.run(
        [*git, "ls-tree", "-r", "-t", "--name-only", commit], capture_output=True, check=True
    ).stdout
    there = set(listing.decode().splitlines())
    folders = [folder for folder in project.folders if folder in there]
    if not folders:
        return
    archive = subprocess.run(
        [*git, "archive", commit, *folders], capture_output=True, check=True
    ).stdout
    suffixes = (".ipynb",) if project.is_notebooks else CONFIGS
    with tarfile.open(fileobj=BytesIO(archive)) as tar, TemporaryDirectory() as notebooks:
        files = [member for member in tar if member.isfile() and member.name.endswith(suffixes)]
        tar.extractall(notebooks if project.is_notebooks else target, files, filter="data")
        if project.is_notebooks:
            write_all(Path(notebooks), target)


if __name__ == "__main__":
    extract(Path(sys.argv[1]), Path(sys.argv[2]))
