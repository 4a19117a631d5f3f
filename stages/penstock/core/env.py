"""Environment variables. Only this module reads or writes the process environment."""

import os
import re
import sys
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.core.machine.linux import num_cpus
from penstock.core.process.allowed_env import Purpose, is_allowed, is_private, matches_purpose


def cache_home() -> Path:
    """The user's cache directory (XDG) for small rebuildable caches, for example file digests."""
    root = os.environ.get("PENSTOCK_CACHE_HOME")
    if root:
        return Path(root)
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "penstock"


NUM_PROC = ("PENSTOCK_NUM_PROC", "XORL_DATASET_NUM_PROC")
"""Variables with the number of processes of data stages; the first one set is used."""


def variable(name: str) -> str | None:
    """Return the value of a variable named in a config."""
    return os.environ.get(name)


def num_processors() -> int:
    """Number of processes for data stages: one of NUM_PROC, or the CPUs available to this process.
    Raises ConfigError if the variable is not a positive integer."""
    name = next((name for name in NUM_PROC if os.environ.get(name)), None)
    if name is None:
        return num_cpus()
    value = os.environ[name]
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(
            f"{name} is {value!r}, which is no number of processes.\n"
            "  Set it to a whole number above 0, or write data.dataset_num_proc."
        )
    return int(value)


def num_gpus() -> int:
    """Number of CUDA devices available to this process, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # Not nvidiactl, nvidia-uvm or nvidia-modeset, which are no devices to compute on.
    present = len([p for p in Path("/dev").glob("nvidia[0-9]*") if p.name[6:].isdigit()])
    if visible is None:
        return present
    # Slurm sets NoDevFiles in a job without GPUs; CUDA ends the list at -1.
    named = [part for part in visible.split(",") if part.strip() not in ("", "-1", "NoDevFiles")]
    return min(present, len(named))


def waits_for_kernels() -> bool:
    """Whether CUDA_LAUNCH_BLOCKING is set."""
    return os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")


def rank_variables() -> tuple[int, int, int] | None:
    """(rank, local rank, world size) as set by torchrun, or None without torchrun."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank = int(os.environ["RANK"])
    return rank, int(os.environ.get("LOCAL_RANK", rank)), int(os.environ["WORLD_SIZE"])


RANKS_STORE = "PENSTOCK_RANKS_STORE"


def set_ranks_store(name: str) -> None:
    """Set the rendezvous store of the ranks that this process starts."""
    os.environ[RANKS_STORE] = name


def ranks_store() -> str | None:
    """The rendezvous store of ranks that our own agent started."""
    return os.environ.get(RANKS_STORE) or None


def master_address() -> tuple[str, int] | None:
    """Master address and port of the rendezvous store, for ranks started by another launcher, or
    None."""
    if "MASTER_ADDR" not in os.environ:
        return None
    # 29500 is torchrun's default port.
    return os.environ["MASTER_ADDR"], int(os.environ.get("MASTER_PORT", 29500))


def agent_serves_store() -> bool:
    """Whether torchrun's agent serves the rendezvous store, instead of rank 0."""
    # torchrun writes str(True).
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def restart_count() -> int:
    """How often torchrun has restarted these ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def is_one_machine() -> bool:
    """Whether all ranks are known to run on this machine."""
    return os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE", "1")


def be_rank_of_slurm() -> None:
    """Set torchrun's variables in a process that `srun` started.

    Uses the variables of the job step, not of the allocation, which other processes also see.
    Variables set by the user are kept.
    """
    if "RANK" in os.environ or "SLURM_STEP_NUM_TASKS" not in os.environ:
        return
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ["SLURM_JOB_NODELIST"]
    tasks = os.environ["SLURM_STEP_NUM_TASKS"]
    if os.environ.get("SLURM_STEP_NUM_NODES") == "1":
        default({"LOCAL_WORLD_SIZE": tasks})
    # The first host of a Slurm host list: `rack1node08` for `rack[1-2]node[08,10-12],login`.
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])+", nodes)
    assert first, nodes
    # 101 apart, so that the steps of a job do not have the ports of the next job's.
    number = 101 * int(os.environ["SLURM_JOB_ID"]) + int(os.environ.get("SLURM_STEP_ID", 0))
    default(
        {
            "RANK": os.environ["SLURM_PROCID"],
            "LOCAL_RANK": os.environ["SLURM_LOCALID"],
            "WORLD_SIZE": tasks,
            "MASTER_ADDR": re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0]),
            # Below the ephemeral port range; different job steps on a node get different ports.
            "MASTER_PORT": str(20000 + number % 10000),
        }
    )


def hub_is_offline() -> bool:
    """Whether the user has set Hugging Face libraries to offline mode."""
    # The values that huggingface_hub reads as true (its constants.py).
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")


def hub_token() -> str | None:
    """The Hub token from the environment. The login stored on disk is read by huggingface_hub."""
    return os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN") or None


def s3_endpoint() -> str | None:
    """The S3 endpoint, if it is not Amazon's."""
    # In botocore's order: the variable of the service wins over that of all services.
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None


def credentials_for(store: str) -> str | None:
    """The source of the credentials for `s3`, `gcs` or `azure`, by name only."""
    variables, files = _CREDENTIALS.get(store, ((), ()))
    named = next((name for name in variables if os.environ.get(name)), None)
    return named or next((f"~/{f}" for f in files if (Path.home() / f).is_file()), None)


_CREDENTIALS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "s3": (
        ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE"),
        (".aws/credentials", ".aws/config"),
    ),
    "gcs": (
        ("GOOGLE_APPLICATION_CREDENTIALS",),
        (".config/gcloud/application_default_credentials.json",),
    ),
    "azure": (
        (
            "AZURE_STORAGE_CONNECTION_STRING",
            "AZURE_STORAGE_ACCOUNT_KEY",
            "AZURE_STORAGE_SAS_TOKEN",
            "AZURE_STORAGE_CLIENT_ID",
            "AZURE_CLIENT_ID",
        ),
        (".azure/azureProfile.json",),
    ),
}


def wandb_is_logged_in() -> bool:
    """Whether Weights & Biases would find credentials."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    # Where `wandb login` stores the key.
    netrc = Path.home() / ".netrc"
    return netrc.is_file() and "api.wandb.ai" in netrc.read_text(errors="replace")


def wandb_mode() -> str | None:
    """The WANDB_MODE setting: `online`, `offline` or `disabled`."""
    return os.environ.get("WANDB_MODE") or None


def mlflow_uri() -> str | None:
    """The MLflow tracking URI."""
    return os.environ.get("MLFLOW_TRACKING_URI") or None


SERVER_KEYS = "PENSTOCK_SERVER_KEYS"
ENGINE_SECRET = "PENSTOCK_SERVER_ENGINE_SECRET"
WORKERS_SECRET = "PENSTOCK_SERVER_WORKERS_SECRET"


def server_keys() -> tuple[str, ...]:
    """API keys of a training server, comma-separated in the variable."""
    parts = os.environ.get(SERVER_KEYS, "").split(",")
    return tuple(part.strip() for part in parts if part.strip())


def engine_secret() -> str | None:
    """Secret that encrypts the connection between a training server's API and its scheduler."""
    return os.environ.get(ENGINE_SECRET) or None


def workers_secret() -> str | None:
    """Secret that encrypts the connection between a training server's scheduler and its workers."""
    return os.environ.get(WORKERS_SECRET) or None


def child_environment(
    extra: Mapping[str, str], purposes: Collection[Purpose] = (), more: Collection[str] = ()
) -> dict[str, str]:
    """The environment of a child process (`penstock.core.process.allowed_env`), and `extra`."""
    environment = {
        name: value for name, value in os.environ.items() if is_allowed(name, purposes, more)
    }
    return {**environment, **extra}


def require_variables(names: Collection[str], field: str) -> None:
    """Raise ConfigError for variables that `field` passes on but that are not set."""
    if absent := [name for name in names if name not in os.environ]:
        raise ConfigError(
            f"{field} names {', '.join(absent)}, which is not set in this environment.\n"
            "  Export it, or leave it out."
        )


def forget_secrets(purposes: Collection[Purpose] = ()) -> None:
    """Drop the secrets that this process has no purpose for. `multiprocessing` passes the whole
    environment of its parent."""
    for name in [
        name for name in os.environ if is_private(name) and not matches_purpose(name, purposes)
    ]:
        del os.environ[name]


def unless_set(values: Mapping[str, str]) -> dict[str, str]:
    """Those of `values` that the user has not set."""
    return {name: value for name, value in values.items() if name not in os.environ}


OPENMP_SPINS = 1000
"""Spin count of an idle OpenMP thread before it sleeps, about the time between two operators.

By default libgomp spins for milliseconds. On a busy machine, a spinning thread then uses up the
time slice of the thread that it waits for, and training is ten times slower; see
docs/guide/launch.md.
"""


def openmp_waiting() -> dict[str, str]:
    """Variables that set how idle OpenMP threads wait, unless the user has set OMP_WAIT_POLICY."""
    return {} if "OMP_WAIT_POLICY" in os.environ else {"GOMP_SPINCOUNT": str(OPENMP_SPINS)}


# Settings of PyTorch's caching allocator; the second is the older name.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def cuda_allocator() -> dict[str, str]:
    """Expandable segments, which rows of varying length fragment less; empty without a GPU, or if
    the user has configured the allocator."""
    if not num_gpus() or any(name in os.environ for name in ALLOCATOR):
        return {}
    return {ALLOCATOR[0]: "expandable_segments:True"}


KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""glibc then keeps freed memory for the next step. By default it returns that of large tensors to
the system, which clears every page again: a fifth of a short step of 135M weights on a CPU."""


def host_allocator() -> dict[str, str]:
    """`KEEPS_MEMORY` where weights are in host memory; empty with a GPU, or if the user has
    configured malloc. Other C libraries do not read it."""
    if num_gpus() or any(name.startswith("MALLOC_") for name in os.environ):
        return {}
    return KEEPS_MEMORY


def terminal_width() -> dict[str, str]:
    """Variable that passes the terminal width to children whose output is forwarded; empty if
    stderr is not a terminal."""
    try:
        width = os.get_terminal_size(sys.stderr.fileno()).columns
    # A notebook's stream has no file descriptor (io.UnsupportedOperation); a closed one raises
    # ValueError.
    except (OSError, ValueError):
        return {}
    return {"COLUMNS": str(width)} if width else {}  # Some terminals report a width of 0.


def num_columns() -> int | None:
    """Terminal width for this process's output, if known."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) else None


def default(values: Mapping[str, str]) -> None:
    """Set those variables that the user has not set."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


@contextmanager
def meanwhile(values: Mapping[str, str]) -> Generator[None]:
    """Set these variables inside the block and restore the previous values afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
