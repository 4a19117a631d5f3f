"""Stages of packages: what a package declares, and the stage that runs it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import RootModel

from penstock.core.cache.stage import Artifact, Facts, Stage
from penstock.core.extensions import STAGES, Part


class PackageStage(Part, ABC):
    """A stage of a package (`penstock.stages`), with its options as fields. Its result is cached
    under a key of its options, the versions of part and package, and what it reads."""

    reads: ClassVar[tuple[str, ...]]
    """The stages whose results it reads: ours, or others of packages."""

    @abstractmethod
    def run(self, inputs: Mapping[str, Artifact], out: Path) -> Facts:
        """Write the result into the folder `out` and return facts about it, as JSON.

        `inputs` are the results of `reads`, by name. After an interruption `out` has what the last
        attempt wrote; temporary files end with `.part`.
        """


@dataclass(frozen=True)
class PackageStep(Stage):
    """The stage that runs a `PackageStage`."""

    stage: PackageStage
    upstream: Mapping[str, Artifact]

    @classmethod
    def build(
        cls, name: str, options: Mapping[str, Any], results: Mapping[str, Artifact]
    ) -> "PackageStep":
        """The stage `name`; `results` has those of the stages that it reads."""
        stage: PackageStage = STAGES.build(name, options)
        record = STAGES.record(name, options) or {}
        # A class for each: `identity` reads name and version, which are class variables of a Stage.
        kind = type(cls.__name__, (cls,), {"name": name, "version": record.pop("version")})
        return kind(RootModel(record), stage, {read: results[read] for read in stage.reads})

    @property
    def inputs(self) -> Mapping[str, Artifact]:
        return self.upstream

    def run(self, out: Path) -> Facts:
        return self.stage.run(self.upstream, out)
