"""Writes the arguments of trainers in notebooks as config files of TRL.

`python -m tests.config.dialects.notebooks FOLDER OUT` reads Unsloth's notebooks: the keyword
arguments of its models, adapters and trainers that are literals, or names of literals.

Cells are read as IPython reads them: its commands are no Python, and the standard library does not
parse them.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

COMMAND = re.compile(r"^(\s*)(\w+\s*=\s*)?[!%]")
"""A line for the shell or for IPython, whose output a name may take."""
CELL_COMMAND = re.compile(r"^%%(\w+)")
"""The first line of a cell; what follows may be of another language, or a file."""
OF_PYTHON = ("capture", "time", "timeit")
CALLS = (
    *("SFTConfig", "TrainingArguments", "UnslothTrainingArguments"),
    *("DPOConfig", "ORPOConfig", "KTOConfig", "GRPOConfig"),
)
TRAINERS = ("SFTTrainer", "UnslothTrainer", "DPOTrainer", "ORPOTrainer")
TRAINS = re.compile(rf"\b({'|'.join(CALLS)})\(")
MODELS = ("FastLanguageModel", "FastModel", "FastVisionModel")
RENAMED = {
    "model_name": "model_name_or_path",
    "r": "lora_r",
    "target_modules": "lora_target_modules",
    "bias": "lora_bias",
}


def sources(notebook: Path) -> list[str]:
    """The Python of each cell of a notebook."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return [python_of(source) for source in code]


def python_of(source: str) -> str:
    """A cell without its commands: lines are `pass`, or an assignment of None, and lines that a
    backslash joins to them are left out."""
    lines = source.splitlines()
    first = next((line for line in lines if line.strip() and not line.startswith("#")), "")
    if (magic := CELL_COMMAND.match(first)) and magic[1] not in OF_PYTHON:
        return ""
    python: list[str] = []
    command: re.Match[str] | None = None
    continues = False
    for line in lines:
        command = command if continues else COMMAND.match(line)
        if command is None:
            python.append(line)
        elif not continues:
            python.append(f"{command[1]}{command[2]}None" if command[2] else f"{command[1]}pass")
        continues = line.endswith("\\")
    return "\n".join(python)


def arguments(cells: Sequence[str]) -> dict[str, Any]:
    """The keyword arguments, by the names of TRL's command line; null where they are computed.

    Raises SyntaxError for a cell that configures training and is no Python of this version.
    """
    tree = ast.Module([node for cell in cells for node in _statements(cell)], [])
    names: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names[node.targets[0].id] = literal(node.value, names)
    arguments: dict[str, Any] = {}
    for name, keyword in keywords(tree):
        # Later cells load the trained model again, by another name.
        arguments.setdefault(RENAMED.get(name, name), literal(keyword, names))
    return arguments


def _statements(cell: str) -> list[ast.stmt]:
    try:
        return ast.parse(cell).body
    except SyntaxError:
        # Python 3.11 has no quotes of an f-string in its expressions, with which prompts are made.
        if any(f"{call}(" in cell for call in CALLS):
            raise
        return []


def keywords(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """The keyword arguments of all calls that configure training."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            owner = called.partition(".")[0]
            if called == "ORPOConfig":
                yield "loss_type", ast.Constant(value="orpo")
            written = [(word.arg, word.value) for word in node.keywords if word.arg]
            if called in CALLS or (
                owner in MODELS and called.endswith(("pretrained", "peft_model"))
            ):
                yield from written
            if called in TRAINERS:
                # Their other arguments are objects: the model, its tokenizer, data, functions.
                yield from (
                    (name, value)
                    for name, value in written
                    if isinstance(value, ast.Constant) and value.value is not None
                )
            if owner in MODELS and called.endswith("pretrained") and node.args:
                yield "model_name", node.args[0]
            if owner in MODELS and called.endswith("peft_model"):
                yield "use_peft", ast.Constant(value=True)


def literal(node: ast.expr, names: dict[str, Any]) -> Any:
    """The value of a literal or of a name; None for anything else."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def write_all(folder: Path, out: Path) -> None:
    """Write a config file for each notebook that trains with one of `CALLS`."""
    for notebook in sorted(folder.rglob("*.ipynb")):
        cells = sources(notebook)
        if not TRAINS.search("\n".join(cells)):
            continue
        target = out / notebook.relative_to(folder).with_suffix(".yaml")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(yaml.safe_dump(arguments(cells), sort_keys=False), encoding="utf-8")


if __name__ == "__main__":
    write_all(Path(sys.argv[1]), Path(sys.argv[2]))
