"""Lines of each area beside its budget, and locals whose names say nothing (`-m tests.budgets`).

An area above its budget in `budgets.toml` is an error. `--write` lowers budgets to what is there.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter

from tests.conftest import ROOT

BUDGETS = ROOT / "tests/budgets.toml"
FIELD_WORDS = {"left", "right", "turn", "side"}
"""Words of the field: two operands, a turn of a conversation, a side of a preference pair."""


def area_of(path):
    """stages/penstock/engine/x.py -> engine; files at the root of the package -> penstock."""
    parts = path.split("/")
    if parts[0] != "stages":
        return parts[0]
    return parts[2] if len(parts) > 3 else parts[1]


def vague_locals(tree, words):
    """(line, name) of every binding and parameter with a name of `words`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        else:
            continue
        if name.strip("_") in words:
            yield node.lineno, name


def measure(words):
    """Lines and vague locals by area; where each of the latter is."""
    command = ["git", "-C", str(ROOT), "ls-files", "*.py"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines, vague, locations = Counter(), Counter(), []
    for path in listed.splitlines():
        if not (ROOT / path).is_file() or path.endswith("_pb2.py"):
            continue
        text, area = (ROOT / path).read_text(encoding="utf-8"), area_of(path)
        lines[area] += text.count("\n")
        if area == "tests":
            continue
        for line, name in vague_locals(ast.parse(text), words):
            vague[area] += 1
            locations.append((area, f"{path}:{line} {name}"))
    return lines, vague, locations


def main(write):
    budgets = tomllib.loads(BUDGETS.read_text())
    lines, vague, locations = measure(set(budgets["words"].split()) - FIELD_WORDS)
    above = []
    for area, count in sorted(lines.items(), key=lambda item: -item[1]):
        line_budget, vague_budget = budgets["areas"].get(area, [0, 0])
        print(
            f"{count:7,} of {line_budget:7,} lines {vague[area]:5} of {vague_budget:5} names {area}"
        )
        if count > line_budget:
            above.append(f"{area}: {count:,} lines are over its budget of {line_budget:,}")
        if vague[area] > vague_budget:
            above.append(f"{area}: {vague[area]} locals say nothing, {vague_budget} are allowed:")
            above += [f"  {location}" for owner, location in locations if owner == area][:10]
    print(
        f"{sum(lines.values()) - lines['tests']:7,} lines of product, {sum(vague.values())} names"
    )
    if write:
        lowered = BUDGETS.read_text()
        for area, (line_budget, vague_budget) in budgets["areas"].items():
            now = [min(line_budget, lines[area]), min(vague_budget, vague[area])]
            lowered = re.sub(
                rf"^{area} = \[[^]]*\]", f"{area} = {now}", lowered, flags=re.MULTILINE
            )
        BUDGETS.write_text(lowered)
    elif above:
        sys.exit("\n".join([*above, "tests/budgets.toml says how a budget is raised."]))


if __name__ == "__main__":
    main("--write" in sys.argv)
