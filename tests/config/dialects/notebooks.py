"""Writes the arguments of trainers in notebooks as config files of TRL.

`python -m tests.config.dialects.notebooks FOLDER OUT` reads Unsloth's notebooks: the keyword
arguments of its models, adapters and trainers that are literals, or names of literals.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

SHELL = re.compile(r"^(\s*)[!%].*")
CALLS = ("SFTConfig", "TrainingArguments", "UnslothTrainingArguments", "DPOConfig")
MODELS = ("FastLanguageModel", "FastModel", "FastVisionModel")
RENAMED = {
    "model_name": "model_name_or_path",
    "r": "lora_r",
    "target_modules": "lora_target_modules",
    "bias": "lora_bias",
}
TRAINED_BY_OTHERS = ("GRPOConfig", "ORPOConfig", "KTOConfig", "RewardConfig")


def sources(notebook: Path) -> str:
    """The code of a notebook, without its shell lines."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    lines = (line for text in code for line in text.splitlines())
    return "\n".join(SHELL.sub(r"\1pass", line) for line in lines)


def arguments(code: str) -> dict[str, Any]:
    """The keyword arguments, by the names of TRL's command line; null where they are computed."""
    tree = ast.parse(code)
    names: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names[node.targets[0].id] = literal(node.value, names)
    arguments: dict[str, Any] = {}
    for name, keyword in keywords(tree):
        # Later cells load the trained model again, by another name.
        arguments.setdefault(RENAMED.get(name, name), literal(keyword, names))
    return arguments


def keywords(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """The keyword arguments of all calls that configure training."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            owner = called.partition(".")[0]
            if called in CALLS or (
                owner in MODELS and called.endswith(("pretrained", "peft_model"))
            ):
                yield from ((word.arg, word.value) for word in node.keywords if word.arg)
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
        try:
            code = sources(notebook)
            values = arguments(code)
        except (SyntaxError, ValueError) as error:
            print(f"{notebook.name}: {error}")
            continue
        trains = any(f"{call}(" in code for call in CALLS)
        if not trains or any(f"{call}(" in code for call in TRAINED_BY_OTHERS):
            continue
        target = out / notebook.relative_to(folder).with_suffix(".yaml")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")


if __name__ == "__main__":
    write_all(Path(sys.argv[1]), Path(sys.argv[2]))
