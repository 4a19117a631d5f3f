"""The stages of a run, where their results are, and how training processes are started."""

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field

from penstock.config.schema.base import FOLDER, ConfigSection
from penstock.config.schema.effect import OnlyWith
from penstock.config.schema.registered import Registered
from penstock.core.extensions import STAGES as REGISTRY
from penstock.core.process.rendezvous_endpoint import parse_endpoint
from penstock.core.remote.urls import PACKAGE_OF, WEB, is_url, redact


def _check_result_path(value: str) -> str:
    if not is_url(value):
        return value
    scheme, _, below = value.partition("://")
    if scheme.lower() not in PACKAGE_OF or scheme.lower() in WEB:
        raise ValueError(
            f"results cannot be written to {scheme}://; write a folder, or the URL of an object "
            "store (s3://bucket/folder)"
        )
    if not below.strip("/"):
        raise ValueError(f"{value} has no bucket; write {scheme}://bucket/folder")
    if redact(value) != value:
        raise ValueError(
            f"{redact(value)} has a user, a password or a query; leave them out, and "
            "set the credentials in the environment"
        )
    return value.rstrip("/")


# A folder for results. Results at a URL are written to a local mirror of it and uploaded.
Root = Annotated[str, FOLDER, AfterValidator(_check_result_path)]


StageName = Literal["prepare", "encode", "pack", "reference", "train", "export", "push"]

# All stages, in the only order in which they can run.
STAGES: tuple[StageName, ...] = get_args(StageName)

# The stages if none are written; `push` is added if it has a target.
DEFAULT_STAGES: tuple[StageName, ...] = ("prepare", "pack", "train", "export")

SET_BY_THE_LAUNCHER = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# `_ID` as in AWS_ACCESS_KEY_ID.
SECRET = re.compile(r"(^|_)(TOKEN|API_KEY|ACCESS_KEY|SECRET|PASSWORD)(_ID)?$", re.IGNORECASE)


def _check_env(value: dict[str, str]) -> dict[str, str]:
    for name, text in value.items():
        variable_names([name])
        if SECRET.search(name):
            raise ValueError(
                f"{name} looks like a secret, and the config of a run is stored with its results;"
                " set it in the environment that penstock is started from"
            )
        if "\0" in text:
            raise ValueError(f"the value of {name} contains a NUL character")
    return value


def variable_names(value: list[str]) -> list[str]:
    """Check names of environment variables. Raises ValueError for a name that is invalid or may not
    be passed on."""
    for name in value:
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a valid name of an environment variable")
        if name in SET_BY_THE_LAUNCHER:
            raise ValueError(f"{name} is set for each process by the launcher; leave it out")
    return value


def _check_endpoint(value: str) -> str:
    try:
        parse_endpoint(value)
    except ValueError:
        raise ValueError(
            f"{value!r} is not HOST:PORT; write the first node's host name and a free port, such as"
            " node0:29500"
        ) from None
    return value


TASK_RUNNER = OnlyWith("pipeline.task_runner", ("dask", "ray"), why="there is no task runner")


class PipelineConfig(ConfigSection):
    """The stages of the run, their cache and retries."""

    name: str = Field(default="finetune", min_length=1)
    """Name of the run in its report, in trackers and in Prefect."""

    stages: list[StageName] | None = Field(default=None, min_length=1)
    """Stages to run, in this order. Unset: prepare, pack, train and export, and push if
    `push.repo_id` or `push.url` is set. `encode` is added if `pack` is there and
    `data.encode_images` is true, and `reference` if `train` is there and its loss needs a reference
    model."""

    extra_stages: dict[
        Annotated[str, Registered(REGISTRY, "is ours; write it in pipeline.stages")], dict[str, Any]
    ] = Field(default_factory=dict[str, dict[str, Any]])
    """Stages of installed packages to run besides, by name, each with its options: `{data_card:
    {bins: 20}}`. Each runs after the stages that it reads; its results are in `artifacts_path`."""

    artifacts_path: Root = Field(default="artifacts", min_length=1)
    """Folder for exports and records of pushes. May be the URL of an object store."""

    cache: Literal["reuse", "refresh", "off"] = "reuse"
    """Cache of stage results: `reuse` uses results that exist, `refresh` builds all again and
    replaces them, `off` builds all again and does not resume incomplete ones."""

    verify: Literal["always", "changed", "off"] = "changed"
    """Which files of a result are verified before it is reused or read by a stage. `always`: the
    SHA-256 of every file is compared with the manifest. `changed`: that of files that were not
    verified yet or whose inode, size or times changed since. `off`: only sizes are compared."""

    retries: int = Field(default=2, ge=0)
    """How often a stage is retried after a transient error: a lost connection, training processes
    that were killed or lost one another. It resumes where it stopped. Errors in the config, the
    data or the code are reported at once."""

    retry_delay: float = Field(default=10, ge=0, allow_inf_nan=False)
    """Seconds before a stage is retried; doubled with each retry of the stage."""

    timeouts: dict[
        Annotated[StageName | str, Registered(REGISTRY)],
        Annotated[float, Field(gt=0, allow_inf_nan=False)],
    ] = Field(default_factory=dict[str, float])
    """Timeout of each stage in seconds, for example `prepare: 3600`. What the stage has written is
    kept, and training saves a checkpoint first; there is no automatic retry. Time spent waiting for
    another run that builds the same result does not count."""

    task_runner: Literal["dask", "ray"] | None = None
    """Prefect task runner for the slices of `prepare`. Unset: processes on this machine, as on the
    command line."""

    task_runner_address: Annotated[str | None, TASK_RUNNER] = Field(default=None, min_length=1)
    """Address of a running Dask scheduler or Ray cluster. Unset: one is started on this machine."""

    task_runner_workers: Annotated[int | None, TASK_RUNNER] = Field(default=None, gt=0)
    """Number of parts into which the slices are divided, and of workers of a cluster that is
    started here. Unset: `data.dataset_num_proc`."""


class LaunchConfig(ConfigSection):
    """How torchrun starts the training processes."""

    nproc_per_node: Annotated[int, Field(gt=0, le=1024)] | Literal["auto"] = "auto"
    """Training processes on each node. `auto`: one for each GPU, or one without GPUs."""

    nnodes: int = Field(default=1, gt=0, le=100_000)
    """Number of nodes (machines) that train together."""

    node_rank: int = Field(default=0, ge=0)
    """Rank of this node, from 0."""

    rdzv_endpoint: Annotated[str, AfterValidator(_check_endpoint)] | None = None
    """Rendezvous endpoint: `host:port` of the first node. Required with several nodes."""

    max_restarts: int = Field(default=0, ge=0)
    """How often training processes are restarted, from the newest checkpoint, after a failure or a
    hang."""

    timeout: float | None = Field(default=None, gt=0)
    """Hang watchdog: seconds without progress (a step, a save, a part of an evaluation) after which
    the training processes are killed and the log reports which rank is behind and where. Unset:
    reported after 1800 seconds; processes are killed only if a collective operation times out."""

    stop_timeout: float = Field(default=35, gt=0, allow_inf_nan=False)
    """Seconds that training processes have to finish their step and save a checkpoint when they are
    asked to stop; then they are killed, and the next start resumes from the previous checkpoint.
    Prefect kills a cancelled flow after 30 seconds; its training may continue for at most this
    long."""

    env: Annotated[dict[str, str], AfterValidator(_check_env)] = Field(
        default_factory=dict[str, str]
    )
    """Environment variables of the training processes. Not for secrets."""

    pass_env: Annotated[list[str], AfterValidator(variable_names)] = Field(
        default_factory=list[str]
    )
    """Names of further environment variables of the launcher that are passed to the training
    processes. Those of the system, compilers, CUDA and torch, and credentials of the trackers in
    use, are always passed."""
