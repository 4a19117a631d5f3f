"""The file that tells a process which rank to run dry, and the file with what it found."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from penstock.config.schema.run import RunConfig
from penstock.core.files import read_json, write_json
from penstock.engine.distributed.parallel_dims import ParallelDims, accumulation_steps


@dataclass(frozen=True)
class _JsonFile:
    def write(self, path: Path) -> None:
        """Write the fields to a file."""
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the fields from a file."""
        return cls(**read_json(path))


@dataclass(frozen=True)
class DryRunJob(_JsonFile):
    """One rank of a run on a device that is not there."""

    config: Mapping[str, Any]
    """The fields of the run that are set."""
    row_length: int
    hf_config: Mapping[str, Any]
    device: str
    """Name in `core.machine.device_specs`."""
    local_ranks: int
    """Ranks per machine."""
    world_size: int
    rank: int
    micro_batches: int
    """Micro-batches of a step on this rank."""
    output: str
    """Where the result is written."""
    documents: Sequence[int] = ()
    """Lengths of documents that attention is computed of; empty: drawn."""

    @classmethod
    def build(
        cls,
        run: RunConfig,
        hf_config: Mapping[str, Any],
        dims: ParallelDims,
        *,
        rank: int,
        device: str,
        local_ranks: int,
        folder: Path,
    ) -> "DryRunJob":
        """The job of a rank; its result is written to `folder`."""
        return cls(
            # Rules and defaults depend on which fields are set, so defaults are not written out.
            run.model_dump(mode="json", exclude_unset=True),
            run.data.row_length,
            hf_config,
            device,
            local_ranks,
            dims.world_size,
            rank,
            accumulation_steps(run.train, dims.num_replicas),
            str(folder / f"rank_{rank}.json"),
        )

    def run(self) -> RunConfig:
        """The run's config."""
        return RunConfig.model_validate(self.config).with_row_length(self.row_length)


@dataclass(frozen=True)
class RankResult(_JsonFile):
    """What one rank's second step shows; the first allocates optimizer states."""

    rank: int
    peak: int
    """Peak bytes."""
    holders: Mapping[str, int]
    """Bytes at the peak by `holders.Holder`."""
    resident: int
    """Bytes after assembly: weights and buffers that are always there."""
    largest: Sequence[Sequence[Any]]
    """(place, bytes) that hold the most at the peak."""
    groups: Sequence[int]
    """Sizes of this rank's process groups: each is an NCCL communicator."""
    faults: Sequence[Sequence[Any]]
    """(fault, place, times)."""
    records: Sequence[Sequence[Any]]
    """The trace of the step (`Trace.as_json`)."""
    flops: float
    """FLOPs of the rank's kernels."""
    notes: Sequence[str]
    """What the engine reports while it builds the model."""
    num_layers: int
    """Decoder layers of this rank."""
    micro_batches: int
    """Micro-batches of a step."""
    tokens: int
    """Tokens of this rank's micro-batches in a step."""
