"""How far every layout is from one process: `python -m tests.bench.bench_layouts`.

Each trains the same small model on the same packed rows for three steps. The table of all of them,
with the worst relative difference of each kind, is written into docs/benchmarks/layouts.md.
"""

import re
import tempfile
from functools import cache
from pathlib import Path

from tests.engine.inputs import write_rows
from tests.engine.laid import Layout, alone
from tests.engine.layouts import LAYOUTS
from tests.engine.traces import Errors, Trace, errors, trace_here, trace_of_transformers
from tests.ranks import on_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "layouts.md"
TABLE = re.compile(r"(?<=<!-- layouts: begin -->\n).*?(?=<!-- layouts: end -->)", re.DOTALL)

HEAD = """| layout | model | ranks | loss | gradient norm | gradients | weights |
|---|---|---|---|---|---|---|
"""


def row(layout: Layout, ranks: int, far: Errors) -> str:
    """A line of the table."""
    model = layout.alone.name.removeprefix("one process of ")
    figures = " | ".join("0" if error == 0 else f"{error:.0e}" for error in far)
    return f"| {layout.name} | {model} | {ranks} | {figures} |\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "packed", 24)

        @cache
        def reference(name: str) -> Trace:
            job = named[name].job(folder, name)
            return on_ranks(1, trace_here, job, timeout=600)[0]

        named = {layout.alone.name: layout.alone for layout in LAYOUTS.values()}

        rows = []
        for kind in ("tied", "untied", "two key heads"):
            mine = reference(alone(kind).name)
            theirs = Layout("transformers", {}, kind=kind)
            rows.append(
                row(theirs, 1, errors(trace_of_transformers(folder, kind, mine.rows), mine))
            )
        for layout in LAYOUTS.values():
            job = layout.job(folder, layout.name)
            got = on_ranks(layout.world, trace_here, job, timeout=600)[0]
            rows.append(row(layout, layout.world, errors(got, reference(layout.alone.name))))
            print(rows[-1], end="", flush=True)
    text = PAGE.read_text()
    assert TABLE.search(text), f"{PAGE} has no place for the table"
    PAGE.write_text(TABLE.sub("".join([HEAD, *rows]), text))


if __name__ == "__main__":
    main()
