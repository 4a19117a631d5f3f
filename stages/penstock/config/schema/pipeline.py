"""Which stages a run has, where their results lie, and how training processes are started."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from penstock.config.schema.base import ConfigSection
from penstock.core.process.rendezvous import parse_endpoint
from penstock.core.remote.urls import PACKAGE_OF, WEB, is_url, redact


def _writable(value: str) -> str:
    if not is_url(value):
        return value
    scheme, _, below = value.partition("://")
    if scheme.lower() not in PACKAGE_OF or scheme.lower() in WEB:
        raise ValueError(
            f"results cannot be written to {scheme}://; write a folder, or the URL of an object "
            "store (s3://bucket/folder)"
        )
    if not below.strip("/"):
        raise ValueError(f"{value} names no bucket; write {scheme}://bucket/folder")
    if redact(value) != value:
        raise ValueError(
            f"{redact(value)} is written with a user, a password or a query; leave them out, and "
            "set the credentials in the environment"
        )
    return value.rstrip("/")


Root = Annotated[str, AfterValidator(_writable)]
"""A folder that results go to. Behind a URL they are kept; work is done in a mirror of it here."""


StageName = Literal["prepare", "pack", "reference", "train", "export", "push"]

STAGES: tuple[StageName, ...] = ("prepare", "pack", "reference", "train", "export", "push")
"""All stages, in the only order they can run in."""

DEFAULT_STAGES: tuple[StageName, ...] = ("prepare", "pack", "train", "export")
"""Those of a run that names none; `push` is added where it has a target."""

SET_BY_THE_LAUNCHER = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SECRET = re.compile(r"(^|_)(TOKEN|API_KEY|ACCESS_KEY|SECRET|PASSWORD)(_ID)?$", re.IGNORECASE)


def _variables(value: dict[str, str]) -> dict[str, str]:
    for name, text in value.items():
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of an environment variable")
        if name in SET_BY_THE_LAUNCHER:
            raise ValueError(f"{name} is set for each process by the launcher; leave it out")
        if SECRET.search(name):
            raise ValueError(
                f"{name} looks like a secret, and a run's configuration is kept beside its results;"
                " set it in the environment that penstock is started from"
            )
        if "\0" in text:
            raise ValueError(f"the value of {name} contains a NUL character")
    return value


def variable_names(value: list[str]) -> list[str]:
    """The same. Raises ValueError for what is no name of a variable that may be passed on."""
    for name in value:
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of an environment variable")
        if name in SET_BY_THE_LAUNCHER:
            raise ValueError(f"{name} is set for each process by the launcher; leave it out")
    return value


def _endpoint(value: str) -> str:
    try:
        parse_endpoint(value)
    except ValueError:
        raise ValueError(
            f"{value!r} is no HOST:PORT; write the first machine's name and a free port of it, such"
            " as node0:29500"
        ) from None
    return value


class PipelineConfig(ConfigSection):
    """The chain of stages."""

    name: str = Field(default="finetune", min_length=1)
    """Name of the run, in its report and in Prefect."""

    stages: list[StageName] | None = Field(default=None, min_length=1)
    """Stages to run, in this order. Unset: prepare, pack, train and export, and push with
    `push.repo_id` or `push.url`. `reference` is added when `train` is there and what it learns
    needs it."""

    artifacts_path: Root = Field(default="artifacts", min_length=1)
    """Folder for exports and records of pushes. May be the URL of an object store."""

    cache: Literal["reuse", "refresh", "off"] = "reuse"
    """`reuse` takes results that are there, `refresh` builds anew and replaces them, `off` builds
    anew and resumes nothing."""

    verify: Literal["always", "changed", "off"] = "changed"
    """What is read of a result before it is reused or read by a stage. `always`: every file, whose
    SHA-256 must be the manifest's. `changed`: files of which that is not known yet, or that changed
    since by their inode, size or times. `off`: none; only sizes are compared."""

    retries: int = Field(default=2, ge=0)
    """How often a stage is tried again after a fault that may pass: a lost connection, training
    processes that were killed or lost each other. It goes on where it stopped. Faults of settings,
    of data and of programs are told at once."""

    retry_delay: float = Field(default=10, ge=0, allow_inf_nan=False)
    """Seconds before a stage is tried again; each pause of a stage doubles the one before."""

    timeouts: dict[StageName, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        default_factory=dict[StageName, float]
    )
    """Seconds after which a stage is ended, by its name, such as `prepare: 3600`. What it wrote is
    kept, and training saves first; it is not tried again by itself. Time spent waiting for another
    run that builds the same is not counted."""

    task_runner: Literal["dask", "ray"] | None = None
    """What a Prefect flow spreads the slices of `prepare` over. Unset: processes of this machine,
    as the command line does."""

    task_runner_address: str | None = Field(default=None, min_length=1)
    """Address of a running Dask scheduler or Ray cluster. Unset: one is started on this machine."""

    task_runner_workers: int | None = Field(default=None, gt=0)
    """Shares that the slices are dealt into, and workers of a cluster that is started here. Unset:
    as `data.dataset_num_proc`."""


class LaunchConfig(ConfigSection):
    """How torchrun starts the training processes."""

    nproc_per_node: Annotated[int, Field(gt=0)] | Literal["auto"] = "auto"
    """Training processes on this machine. `auto`: one for each GPU, or one without GPUs."""

    nnodes: int = Field(default=1, gt=0)
    """Machines that train together."""

    node_rank: int = Field(default=0, ge=0)
    """Which of them this is, counted from 0."""

    rdzv_endpoint: Annotated[str, AfterValidator(_endpoint)] | None = None
    """Where machines meet, `host:port` of the first of them. Needed with several machines."""

    max_restarts: int = Field(default=0, ge=0)
    """How often training processes are started again, from the newest checkpoint, after a
    failure or after they hung."""

    timeout: float | None = Field(default=None, gt=0)
    """Seconds without anything moving (a step, a save, a part of an evaluation) after which the
    processes are killed, and it is told which one is behind and where. Unset: it is told after
    1800 seconds, and nothing is killed unless a collective operation waits in vain."""

    stop_timeout: float = Field(default=35, gt=0, allow_inf_nan=False)
    """Seconds that training processes have to finish their step and save when they are asked to
    stop; then they are killed, and the next start goes on from the checkpoint before. Prefect kills
    a flow that is cancelled after 30 seconds, which its training outlives by no more than this."""

    env: Annotated[dict[str, str], AfterValidator(_variables)] = Field(
        default_factory=dict[str, str]
    )
    """Environment variables for the training processes. Not for secrets."""

    pass_env: Annotated[list[str], AfterValidator(variable_names)] = Field(
        default_factory=list[str]
    )
    """Names of environment variables of the launcher that training processes get besides. They get
    those of the system, compilers, CUDA and torch, and credentials of the trackers in use."""
