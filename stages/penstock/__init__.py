"""Penstock fine-tunes language models as a pipeline of discrete, cached stages.

`penstock.load` returns a run, whose methods plan, run and read its stages; see
docs/guide/python.md. Names are imported on first use, so that `import penstock` is fast.
"""

import importlib
from typing import TYPE_CHECKING

from penstock.version import __version__

if TYPE_CHECKING:
    from penstock.api.load import load
    from penstock.api.report import Report
    from penstock.api.results import (
        ExportedModel,
        PackedData,
        PreparedData,
        Result,
        RunResult,
        Training,
    )
    from penstock.api.run import Run, RunPlan
    from penstock.api.status import StageStatus
    from penstock.config.schema.run import RunConfig
    from penstock.core.errors import (
        ArtifactError,
        CapabilityError,
        ConfigError,
        Interrupted,
        PenstockError,
        StageError,
    )

__all__ = [
    "ArtifactError",
    "CapabilityError",
    "ConfigError",
    "ExportedModel",
    "Interrupted",
    "PackedData",
    "PenstockError",
    "PreparedData",
    "Report",
    "Result",
    "Run",
    "RunConfig",
    "RunPlan",
    "RunResult",
    "StageError",
    "StageStatus",
    "Training",
    "__version__",
    "load",
]

if not TYPE_CHECKING:  # type checkers know the names from above, and refuse others
    _ERRORS = ("ArtifactError", "CapabilityError", "ConfigError", "Interrupted", "PenstockError")
    _RESULTS = ("ExportedModel", "PackedData", "PreparedData", "Result", "RunResult", "Training")
    _HOMES = {
        **dict.fromkeys((*_ERRORS, "StageError"), "penstock.core.errors"),
        **dict.fromkeys(_RESULTS, "penstock.api.results"),
        **dict.fromkeys(("Run", "RunPlan"), "penstock.api.run"),
        "Report": "penstock.api.report",
        "RunConfig": "penstock.config.schema.run",
        "StageStatus": "penstock.api.status",
        "load": "penstock.api.load",
    }

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        attribute = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = attribute
        return attribute

    def __dir__():
        return sorted({*globals(), *__all__})
