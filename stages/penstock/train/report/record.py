"""What a report knows: the files of a training run, read and summed up. Nothing here draws."""

import math
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, cast

from penstock import __version__
from penstock.config.run import RunConfig
from penstock.core import provenance
from penstock.core.data_facts import kept_data_facts
from penstock.core.errors import ConfigError
from penstock.core.files import read_json
from penstock.core.stage import MANIFEST
from penstock.train.job import JOB, METRICS, OUTCOME
from penstock.train.metrics import read_metrics

CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")
"""What may stand before the host of a URL."""


@dataclass(frozen=True)
class RunRecord:
    """One training run, finished or not."""

    config: RunConfig
    steps: list[dict[str, Any]]
    """The records of metrics.jsonl that tell of an optimizer step, in order."""
    evaluations: list[tuple[int, float]]
    """(step, loss) of every evaluation."""
    standing: str
    """One sentence: finished, stopped or not."""
    versions: Mapping[str, str]
    """What ran it, by name."""
    data: Mapping[str, Any] | None
    """What the stages before said of the data, if it was kept."""

    @property
    def title(self) -> str:
        """The name the user gave the pipeline."""
        return self.config.pipeline.name

    @property
    def subject(self) -> str:
        """What was trained on what, in the user's words."""
        model = self.config.model
        start = model.model_path or f"{model.config_path} from random weights"
        data = ", ".join(dataset.path for dataset in self.config.data.datasets)
        lora = self.config.lora
        kind = f"{'DoRA' if lora.use_dora else 'LoRA'} rank {lora.lora_rank}"
        how = kind if lora.enable_lora else "all weights"
        return without_credentials(f"{start} on {data}, {how}")


def read_run(output_dir: Path) -> RunRecord:
    """The run in `output_dir`. Raises ConfigError where there is none, OSError if unreadable."""
    if not (output_dir / JOB).is_file():
        raise ConfigError(
            f"{output_dir} holds no training run: there is no {JOB} in it.\n"
            "  Name a train.output_dir."
        )
    records = list(read_metrics(output_dir / METRICS))
    return RunRecord(
        config=RunConfig.model_validate(read_json(output_dir / JOB)["config"]),
        steps=[record for record in records if "loss" in record],
        evaluations=[(r["step"], r["eval_loss"]) for r in records if "eval_loss" in r],
        standing=_standing(output_dir),
        versions=_versions(output_dir),
        data=kept_data_facts(output_dir),
    )


def key_figures(run: RunRecord) -> list[tuple[str, str]]:
    """The figures people ask for first, as (name, value); empty before the first step.

    Losses are the run's own: of the last step, and of the last evaluation over held-out rows.
    """
    if not run.steps:
        return []
    last = run.steps[-1]
    figures = [("final loss", number(last["loss"]))]
    if run.evaluations:
        figures.append(("held-out loss", number(run.evaluations[-1][1])))
    return [
        *figures,
        ("steps", f"{last['step']:,}"),
        ("epochs", f"{last['epoch']:.2f}"),
        ("tokens", amount(sum(r["tokens"] for r in run.steps))),
        ("of them trained on", amount(sum(r["trained_tokens"] for r in run.steps))),
        ("tokens per second, median", amount(median(r["tokens_per_second"] for r in run.steps))),
        ("time in steps", duration(sum(r["seconds"] for r in run.steps))),
    ]


def written_settings(config: RunConfig) -> list[tuple[str, str]]:
    """(dotted name, value) of every setting that is not at its default."""
    return list(_leaves(config.model_dump(mode="json", exclude_defaults=True)))


def all_settings(config: RunConfig) -> list[tuple[str, str]]:
    """(dotted name, value) of every setting."""
    return list(_leaves(config.model_dump(mode="json")))


def without_credentials(text: str) -> str:
    """`text` without what stands before the host of a URL: a report is made to be sent around."""
    return CREDENTIALS.sub("", text)


def number(value: float) -> str:
    """Four significant digits; small ones in powers of ten, as learning rates are written."""
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}"
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def amount(value: float) -> str:
    """A count of things, to three digits and a unit."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return (
                f"{value / size:.3g} {unit}"
                if value < 999.5 * size
                else f"{value / size:.0f} {unit}"
            )
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, the two largest of them."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _standing(output_dir: Path) -> str:
    path = output_dir / OUTCOME
    if not path.is_file():
        return "not finished"
    outcome = read_json(path)
    if outcome["facts"] is None:
        return f"stopped after step {outcome['step']:,}; the same command goes on from there"
    return "finished"


def _versions(output_dir: Path) -> Mapping[str, str]:
    """Those the manifest was sealed with, or this process's own while there is none yet."""
    path = output_dir / MANIFEST
    if path.is_file():
        return read_json(path)["code"]
    return {
        "penstock": __version__,
        "python": platform.python_version(),
        **provenance.versions(),
    }


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        members = cast("dict[str, Any]", value)
        for name, inner in members.items():
            yield from _leaves(inner, f"{prefix}.{name}" if prefix else name)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for index, inner in enumerate(cast("list[Any]", value)):
            yield from _leaves(inner, f"{prefix}[{index}]")
    elif prefix.startswith("launch.env."):
        # Variables are where people put what is nobody else's business.
        yield prefix, "(not shown)"
    else:
        yield prefix, without_credentials(_plain(value))


def _plain(value: Any) -> str:
    """As YAML would have it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return number(value)
    if isinstance(value, list):
        return f"[{', '.join(_plain(each) for each in cast('list[Any]', value))}]"
    return str(value)
