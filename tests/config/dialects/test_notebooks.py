"""Notebooks are read as IPython reads them."""

import ast
import json
from pathlib import Path

import pytest
import yaml

from tests.config.dialects.notebooks import python_of, write_all

TRAINS = """from trl import SFTConfig
steps = 60
config = SFTConfig(max_steps = steps, learning_rate = 2e-4, optim = name)
"""

CELLS = {
    "%%bash\nfor f in *; do\n  case $f in a) x=07 ;; esac\ndone": "",
    "# Install.\n%%writefile a.yaml\nname: [": "",
    "%%capture\nimport os\n!pip install a\nx = 1": "pass\nimport os\npass\nx = 1",
    "if x:\n    !uv pip install \\\n        'a' \\\n        'b'\ny = 2": "if x:\n    pass\ny = 2",
    "!curl -d '{ \\\n    \"a\": 1 \\\n}'": "pass",
    "%cd build\nx = 1": "pass\nx = 1",
    "files = !ls \\\n  *.py\nx = %env HOME": "files = None\nx = None",
    "x = 1 + \\\n    2": "x = 1 + \\\n    2",
    "x = y \\\n    % 2": "x = y \\\n    % 2",
}
"""Cells, and their Python."""


@pytest.mark.parametrize("cell", CELLS)
def test_commands_of_a_cell_are_no_python(cell: str) -> None:
    assert python_of(cell) == CELLS[cell]
    ast.parse(python_of(cell))


def write_notebook(file: Path, *cells: str) -> None:
    code = [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]
    file.write_text(json.dumps({"cells": [*code, {"cell_type": "markdown", "source": ["%%"]}]}))


def test_arguments_of_trainers_are_those_of_all_cells(tmp_path: Path) -> None:
    notebooks, out = tmp_path / "notebooks", tmp_path / "out"
    notebooks.mkdir()
    of_newer_python = """print(f"{rows["question"]}")"""
    write_notebook(notebooks / "sft.ipynb", *CELLS, of_newer_python, TRAINS)
    write_notebook(notebooks / "orpo.ipynb", "ORPOConfig(beta = 0.1)")
    dpo = "DPOTrainer(model = model, ref_model = None, beta = 0.2, args = DPOConfig(seed = 3))"
    write_notebook(notebooks / "dpo.ipynb", dpo)
    write_notebook(notebooks / "grpo.ipynb", "GRPOConfig(num_generations = 4)", TRAINS)
    write_notebook(notebooks / "chat.ipynb", "FastModel.from_pretrained('a')")
    write_notebook(notebooks / "embed.ipynb", "SentenceTransformerTrainingArguments(seed = 1)")
    write_all(notebooks, out)
    written = {file.stem: yaml.safe_load(file.read_text()) for file in out.glob("*.yaml")}
    assert written == {
        "sft": {"max_steps": 60, "learning_rate": 2e-4, "optim": None},
        "dpo": {"seed": 3, "beta": 0.2},
        "orpo": {"loss_type": "orpo", "beta": 0.1},
        "grpo": {"num_generations": 4, "max_steps": 60, "learning_rate": 2e-4, "optim": None},
    }


def test_a_cell_that_trains_and_cannot_be_parsed_is_an_error(tmp_path: Path) -> None:
    write_notebook(tmp_path / "broken.ipynb", "SFTConfig(max_steps = )")
    with pytest.raises(SyntaxError):
        write_all(tmp_path, tmp_path / "out")
