"""The dry run's durations beside steps that were measured on a GPU:
`python -m tests.bench.fit_roofline [--fit | --count [CASE ...]]`.

Prints for each step of docs/benchmarks/gpu.json the time by the roofline and by its classes of
operators, and the error. Shares of the data sheet are those of `estimate/dryrun/achieved.py`; with
`--fit` those that `FREE` names are fitted to the steps, each held near its prior by how well that
is known. `--count` runs the steps dry and writes their launches to roofline.json, with the commit:
run it with the tree whose steps `make gpu` has measured.
"""

import argparse
import json
import math
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from penstock.estimate.dryrun.achieved import ACHIEVED, Achieved, OperatorClass, Work
from penstock.estimate.dryrun.dry_run import run_jobs
from penstock.estimate.dryrun.job import DryRunJob
from penstock.estimate.dryrun.trace import Launch, records_from_json
from tests.bench.pages import PAGES

COUNTS = Path(__file__).with_name("roofline.json")
DEVICE = "H200"

Shares = Mapping[OperatorClass, Achieved]


@dataclass(frozen=True)
class Measured:
    """A step in gpu.json."""

    step: str
    figure: str
    tokens: int = 8192

    def seconds(self, results: Mapping[str, Any]) -> float:
        """Seconds of the step."""
        figures = results["steps"][self.step]["figures"]
        [rate] = [
            each["value"]
            for each in figures
            if each["name"] == self.figure and each["unit"] == "tokens/s"
        ]
        return self.tokens / rate


STEPS: Mapping[str, Measured] = {
    "adapters": Measured("adapters", "adapters, ours, nothing recomputed"),
    "weights": Measured("weights", "weights, ours, nothing recomputed"),
    "Qwen3-30B-A3B": Measured("experts", "Qwen3-30B-A3B, nothing recomputed"),
    "gpt-oss-20B": Measured("experts", "gpt-oss-20B, nothing recomputed"),
}

MOST_OFF = 0.02
"""The largest error of a step that the fit has."""

MOST_OFF_UNSEEN = 0.10
"""The same of a step that the fit did not see."""


@dataclass(frozen=True)
class Free:
    """A share that steps decide, which several classes may have in common."""

    of: str
    """`flops` or `bandwidth`."""
    classes: tuple[OperatorClass, ...]
    prior: float
    spread: float
    """Relative: how well it is known without the steps."""


FREE = (
    # A layer of 16,384 x 4,096 x 14,336 in bf16, forward and backward (`fp8`): 728 TFLOP/s.
    Free("flops", ("products", "head"), 0.736, 0.05),
    # No row of gpu.json: what flash attention 2 is known for on an H100, less for short documents.
    Free("flops", ("attention forward", "attention backward"), 0.25, 0.3),
    # No row of gpu.json either, and so nearly free.
    Free("flops", ("grouped products",), 0.3, 1.0),
    # AdamW's share is that of the one elementwise kernel that was measured.
    Free(
        "bandwidth",
        (
            *("elementwise", "loss", "products", "head", "grouped products", "float8 products"),
            *("attention forward", "attention backward"),
        ),
        0.6,
        0.25,
    ),
)
STEP_SPREAD = 0.02
"""Relative: how well a step's time is known."""


@dataclass(frozen=True)
class Counted:
    """Launches of a step, which a dry run counted."""

    commit: str
    launches: Sequence[tuple[OperatorClass, Work, int]]

    def seconds(self, shares: Shares) -> dict[OperatorClass, float]:
        """Seconds by class."""
        spent: defaultdict[OperatorClass, float] = defaultdict(float)
        for operators, work, times in self.launches:
            spent[operators] += times * work.seconds(shares[operators])
        return dict(spent)

    def error(self, measured: float, shares: Shares) -> float:
        """Relative error of the step's time."""
        return sum(self.seconds(shares).values()) / measured - 1


def read_counts(file: Path = COUNTS) -> dict[str, Counted]:
    """The steps of roofline.json."""
    return {
        name: Counted(
            step["commit"],
            [
                (operators, Work(compute, traffic), times)
                for operators, compute, traffic, times in step["launches"]
            ],
        )
        for name, step in json.loads(file.read_text()).items()
    }


def read_seconds(folder: Path = PAGES) -> dict[str, float]:
    """Measured seconds of the steps."""
    results = json.loads((folder / "gpu.json").read_text())
    return {name: step.seconds(results) for name, step in STEPS.items()}


def fit(
    counts: Mapping[str, Counted], seconds: Mapping[str, float], steps: Sequence[str] = [*STEPS]
) -> Shares:
    """The shares with `FREE` fitted to these steps, by Gauss and Newton in their logarithms."""
    priors = np.log([free.prior for free in FREE])
    spreads = np.array([free.spread for free in FREE])

    def residuals(at: np.ndarray) -> np.ndarray:
        shares = with_shares(at)
        errors = [counts[name].error(seconds[name], shares) / STEP_SPREAD for name in steps]
        return np.array([*errors, *((at - priors) / spreads)])

    at = priors.copy()
    for _ in range(50):
        now = residuals(at)
        slopes = np.stack(
            [(residuals(at + change) - now) / 1e-4 for change in 1e-4 * np.eye(len(at))], axis=1
        )
        at = at - 0.5 * np.linalg.lstsq(slopes, now, rcond=None)[0]
    return with_shares(at)


def unseen_errors(counts: Mapping[str, Counted], seconds: Mapping[str, float]) -> dict[str, float]:
    """The error of each step by shares that are fitted to the others."""
    errors = {}
    for name in STEPS:
        others = [each for each in STEPS if each != name]
        errors[name] = counts[name].error(seconds[name], fit(counts, seconds, others))
    return errors


def with_shares(logarithms: Sequence[float] | np.ndarray) -> Shares:
    """The shares with those of `FREE` replaced."""
    shares = dict(ACHIEVED)
    for free, logarithm in zip(FREE, logarithms, strict=True):
        for operators in free.classes:
            changed = {free.of: math.exp(logarithm)}
            shares[operators] = replace(shares[operators], **cast(Any, changed))
    return shares


def report(counts: Mapping[str, Counted], seconds: Mapping[str, float], shares: Shares) -> str:
    """A table of the steps: milliseconds by class and in all, measured, and the error."""
    rows = [["", *counts]]
    spent = {name: step.seconds(shares) for name, step in counts.items()}
    for operators in shares:
        cells = [f"{1e3 * spent[name].get(operators, 0.0):.1f}" for name in counts]
        numbers = f"{shares[operators].flops:.3f} {shares[operators].bandwidth:.3f}"
        rows.append([f"{operators} ({numbers})", *cells])
    rows.append(["all, ms", *(f"{1e3 * sum(spent[name].values()):.1f}" for name in counts)])
    rows.append(["measured, ms", *(f"{1e3 * seconds[name]:.1f}" for name in counts)])
    errors = {name: step.error(seconds[name], shares) for name, step in counts.items()}
    rows.append(["error", *(f"{errors[name]:+.1%}" for name in counts)])
    rows.append(["launches of", *(step.commit for step in counts.values())])
    return "\n".join(f"{row[0]:38}" + "".join(f"{cell:>16}" for cell in row[1:]) for row in rows)


def count(names: Sequence[str], commit: str) -> None:
    """Run the steps dry and keep their launches."""
    kept = json.loads(COUNTS.read_text()) if COUNTS.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        jobs = [_job(name, Path(folder) / name) for name in names]
        for name, result in zip(names, run_jobs(jobs), strict=True):
            launches = [
                record
                for record in records_from_json(result.records)
                if isinstance(record, Launch) and record.operators
            ]
            kept[name] = {"commit": commit, "launches": aggregate(launches)}
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(kept[name])}" for name in STEPS)
    COUNTS.write_text(f"{{\n{lines}\n}}\n")


def aggregate(launches: Sequence[Launch]) -> list[tuple[str | None, float, float, int]]:
    """(class, seconds of FLOPs, seconds of bytes, times) of alike launches."""
    alike = Counter(
        (each.operators, float(f"{each.compute:.4g}"), float(f"{each.traffic:.4g}"))
        for each in launches
    )
    return [(*key, times) for key, times in alike.items()]


def _job(name: str, folder: Path) -> DryRunJob:
    from penstock.engine.distributed.parallel_dims import ParallelDims, compute_dims
    from tests.bench import bench_gpu
    from tests.bench.data.packed import draw_lengths
    from tests.bench.gpu import experts
    from tests.bench.train_cuda import settings_of
    from tests.engine import runs

    case = {**bench_gpu.CASES, **experts.CASES}[name]
    model = runs.write_config(folder / "model", **case.hf_config)
    settings = {**settings_of(case), **bench_gpu.OURS["nothing"]}
    data = {"sample_packing_sequence_len": case.row}
    run = runs.run_config(
        folder / "out", model, lora=case.lora, model=case.model, data=data, **settings
    )
    dims = compute_dims(run.train, 1)
    assert isinstance(dims, ParallelDims), dims
    job = DryRunJob.build(
        run, case.hf_config, dims, rank=0, device=DEVICE, local_ranks=1, folder=folder
    )
    rows = draw_lengths(num_rows=4, row=case.row, document=case.document)
    return replace(job, documents=[length for row in rows for length in row])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--count", nargs="*", choices=[*STEPS], metavar="CASE")
    asked = parser.parse_args()
    if asked.count is not None:
        from tests.bench.gpu.results import Origin

        count(asked.count or [*STEPS], Origin.now().commit)
    counts, seconds = read_counts(), read_seconds()
    shares = fit(counts, seconds) if asked.fit else ACHIEVED
    print(report(counts, seconds, shares))
    if asked.fit:
        unseen = unseen_errors(counts, seconds)
        print("fitted to the others", *(f"{name} {error:+.1%}" for name, error in unseen.items()))
    for operators, achieved in shares.items():
        print(f"{operators}: {achieved.source}")


if __name__ == "__main__":
    main()
