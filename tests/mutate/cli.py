"""The command line of the mutation check."""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tests.mutate.running import Outcome, Runner
from tests.mutate.table import Row, read_rows, write_rows


def main(words: Sequence[str] | None = None) -> int:
    """Run the mutants that are asked for; the number of fields whose mutant no test noticed."""
    asked = _parse(words)
    results = Path(asked.resume or tempfile.mkstemp(suffix=".jsonl")[1])
    rows = _chosen(asked.field, asked.section)
    done = {row.field for row in _read(results)}
    left = [row for row in rows if row.field not in done and row.outcome != "explained"]
    if asked.jobs > 1 and len(left) > 1:
        _share(left, asked, results)
    elif left:
        _check(left, asked.test, results, preload=asked.preload)
    found = [row for row in _read(results) if row.field in {one.field for one in rows}]
    survivors = sum(row.outcome == "SURVIVED" for row in found)
    print(f"{len(found)} mutants, {len(found) - survivors} noticed, {survivors} survived")
    if asked.write:
        noticed = {row.field: row for row in found if row.outcome != "SURVIVED"}
        write_rows({**read_rows(), **noticed}.values())
    return min(survivors, 100)


def _parse(words: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser("python -m tests.mutate", description=__doc__)
    parser.add_argument("--field", action="append", default=[], help="only this field")
    parser.add_argument(
        "--section", action="append", default=[], help="only fields of this section"
    )
    parser.add_argument("--test", action="append", default=[], help="instead of the table's test")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run mutants")
    parser.add_argument(
        "--resume", help="results are appended here; fields in it are not run again"
    )
    parser.add_argument("--write", action="store_true", help="write what was noticed to the table")
    parser.add_argument(
        "--no-preload", dest="preload", action="store_false", help="for few tests without torch"
    )
    return parser.parse_args(words)


def _chosen(fields: list[str], places: list[str]) -> list[Row]:
    rows = read_rows()
    if unknown := [field for field in fields if field not in rows]:
        raise SystemExit(f"no row of tests/mutate/table.tsv: {', '.join(unknown)}")
    return [
        row
        for row in rows.values()
        if (row.field in fields or row.field.rpartition(".")[0] in places or not (fields or places))
    ]


def _check(rows: list[Row], tests: list[str], results: Path, *, preload: bool) -> None:
    runner = Runner(preload=preload)
    try:
        for row in rows:
            outcome, seen = _judge(runner, row, tests or [row.told])
            judged = replace(row, outcome=outcome, told=seen.test or row.told)
            with results.open("a") as file:
                file.write(json.dumps(asdict(judged)) + "\n")
            print(f"{judged.outcome:9} {row.field} {judged.told} ({seen.seconds} s)", flush=True)
            if outcome == "SURVIVED":
                print(f"  {seen.status}: {seen.reason}")
    finally:
        runner.close()


def _judge(runner: Runner, row: Row, tests: list[str]) -> tuple[str, Outcome]:
    """Whether the tests notice the mutant, first where validation sees what was written. A test
    that fails without a mutant notices nothing."""
    from tests.mutate.fields import all_fields  # once the runner has patched the config

    field = all_fields()[row.field]
    seen = Outcome("skipped")
    for outcome in ("refused",) if row.outcome == "refused" else ("noticed", "refused"):
        seen = runner.run(tests, field.mutant(validation=outcome == "refused"))
        if seen.status == "failed":
            alone = runner.run([seen.test], None)
            if alone.status == "passed":
                return outcome, seen
            return "SURVIVED", replace(alone, reason=f"without the mutant, too: {alone.reason}")
    return "SURVIVED", seen


def _share(rows: list[Row], asked: Any, results: Path) -> None:
    """Several processes, each with its share of the fields."""
    command = [sys.executable, "-m", "tests.mutate", "--resume", str(results)]
    command += [f"--test={test}" for test in asked.test]
    command += [] if asked.preload else ["--no-preload"]
    shares = [rows[start :: asked.jobs] for start in range(asked.jobs)]
    running = [
        subprocess.Popen([*command, *(f"--field={row.field}" for row in share)])
        for share in shares
        if share
    ]
    for process in running:
        process.wait()


def _read(results: Path) -> list[Row]:
    lines = results.read_text().splitlines() if results.is_file() else []
    return [Row(**json.loads(line)) for line in lines]
