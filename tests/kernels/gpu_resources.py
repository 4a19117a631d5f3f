"""Registers, spills and shared memory of compiled kernels, on every architecture, in a golden file.

`python -m tests.kernels.gpu_resources [ARCH ...]` compiles every kernel in all its ways for these
architectures, or for all, and writes them to the file again, so that a change shows as a diff.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "kernel_resources.json"

SHARED_MEMORY = {
    80: 166_912,
    86: 101_376,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    120: 101_376,
}
"""Bytes that one thread block may use, by architecture (CUDA C++ Programming Guide, table of
technical specifications per compute capability)."""

ARCHITECTURES = tuple(SHARED_MEMORY)

Resources = dict[str, list[int]]
"""By kernel and variant: registers of a thread, spilled bytes of a thread, shared bytes of a block.
"""


def usage_of(found: Any) -> list[int]:
    """Of a compiled kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
        file.flush()
        made = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    numbers = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", made.stdout))
    # What is spilled lies in a thread's stack frame.
    return [int(numbers["REG"]), int(numbers["STACK"]), found.metadata.shared]


def variant_of(types: dict[str, Any], constants: dict[str, Any], options: dict[str, Any]) -> str:
    """The types of its tensors, its constants and options, briefly."""
    pointers = [str(kind) for kind in types.values() if kind and str(kind).startswith(("*", "t"))]
    chosen = {**constants, **options}
    return " ".join(
        ["".join(pointers), *(f"{name}={value}" for name, value in chosen.items() if value != "")]
    )


def read_golden() -> dict[str, Any]:
    """The golden file's content."""
    return json.loads(GOLDEN.read_text())


def compile_all(
    arch: int, parts: list[str], *, all_ways: bool, cache: Path, packages: Path | None = None
) -> Resources:
    """Compile in a process of its own, where Triton does not interpret. `packages`: a folder that
    is searched before the environment."""
    code = f"""from tests.kernels import compiling_for_gpus as t
t.ALL, t.ARCH = {all_ways}, {arch}
for part in {parts}:
    getattr(t, "compile_" + part)()
"""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    if packages:
        environment["PYTHONPATH"] = os.pathsep.join([str(packages), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: Resources = {}
    seen: Counter[str] = Counter()
    for line in done.stdout.splitlines():
        name, usage = json.loads(line)
        seen[name] += 1
        found[name if seen[name] == 1 else f"{name} #{seen[name]}"] = usage
    return found


def main() -> None:
    import triton

    from tests.kernels.test_compiles_for_gpus import KERNELS

    golden = read_golden() if GOLDEN.is_file() else {}
    for arch in map(int, sys.argv[1:]) if sys.argv[1:] else ARCHITECTURES:
        with tempfile.TemporaryDirectory() as cache:
            found = compile_all(arch, [*KERNELS], all_ways=True, cache=Path(cache))
        golden[f"sm_{arch}"] = dict(sorted(found.items()))
        print(f"sm_{arch}: {len(found)} kernels, {sum(one[1] > 0 for one in found.values())} spill")
    golden["triton"] = triton.__version__
    lines = json.dumps(golden, indent=1, sort_keys=True)
    # One kernel to a line.
    GOLDEN.write_text(re.sub(r"\[\s+(\d+),\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2, \3]", lines) + "\n")


if __name__ == "__main__":
    main()
