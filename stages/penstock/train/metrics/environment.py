"""Environment info of a run for its report: hardware, versions, parallel layout."""

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import torch

from penstock.core import env
from penstock.core.cache import provenance
from penstock.core.files import write_json
from penstock.core.machine.linux import cpu_model
from penstock.engine.build import BuiltModel
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.rows.sizing import Finding
from penstock.train.launch.job import ENVIRONMENT, Job
from penstock.version import __version__


def write_environment(
    job: Job,
    built: BuiltModel,
    ranks: ProcessInfo,
    *,
    total_steps: int,
    findings: Sequence[Finding],
) -> None:
    """Write the environment info to the run folder."""
    is_cuda = ranks.device.type == "cuda"
    record: dict[str, Any] = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "total_steps": total_steps,
        "findings": [finding.as_json() for finding in findings],
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "device": torch.cuda.get_device_name(ranks.device)
        if is_cuda
        else f"{cpu_model()}, {env.num_processors()} core(s)",
        "ranks": ranks.world_size,
        "threads": torch.get_num_threads(),
        "layout": built.layout,
        "quantised": list(built.quantized),
        "versions": {
            "penstock": __version__,
            "python": platform.python_version(),
            **provenance.versions(),
            **({"cuda": torch.version.cuda} if is_cuda else {}),
        },
    }
    write_json(job.output_dir / ENVIRONMENT, record)
