"""Launch preparation: the job file, ports and secrets of all server processes."""

import re
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from penstock.config.server.config import ServerConfig, to_run_config
from penstock.core import env
from penstock.core.errors import CapabilityError, ConfigError
from penstock.core.files import read_json_object
from penstock.core.process.rendezvous_endpoint import is_loopback_host
from penstock.core.remote.urls import is_url
from penstock.core.sources.hub import MODEL_FILES, local_folder
from penstock.core.sources.pin import (
    PROCESSOR_FILES,
    TOKENIZER_AND_CONFIG,
    Source,
    pin_config,
    pin_model,
    pin_tokenizer,
)
from penstock.models.vision.types import VISION_TYPES
from penstock.server.launch.addresses import (
    EVERYWHERE,
    LOOPBACK,
    free_port,
    parse_host,
    parse_port,
    tcp,
    workers_address,
    workers_bind,
)
from penstock.server.launch.job import FOLDER, Mode, ServerJob
from penstock.server.protocol.secret import new_secret, read_secret, require_private, write_secret

PACKAGES = {
    "fastapi": "fastapi",
    "google.protobuf": "protobuf",
    "msgspec": "msgspec",
    "prometheus_client": "prometheus_client",
    "uvicorn": "uvicorn",
    "zmq": "pyzmq",
    "zstandard": "zstandard",
}
"""Modules and the packages that provide them."""


def require_packages() -> None:
    """Raise CapabilityError naming every package that is not installed."""
    lacking: list[str] = []
    for module, package in PACKAGES.items():
        # `find_spec` imports the parents of a dotted name, here `google`.
        with suppress(ModuleNotFoundError):
            if find_spec(module) is not None:
                continue
        lacking.append(package)
    if lacking:
        raise CapabilityError(
            f"a training server needs {', '.join(lacking)}, which"
            f" {'is' if len(lacking) == 1 else 'are'} not installed.\n"
            "  Run pip install 'penstock[server]'."
        )


WORKERS_SECRET = "workers.secret"
WORKERS_ADDRESS = "workers.address"
"""Files of separately started workers, for the scheduler that connects to them."""
ADDRESS = re.compile(r"tcp://.+:\d{1,5}")


@dataclass(frozen=True)
class LaunchPlan:
    """Everything the launcher needs to start its processes."""

    job: ServerJob
    keys: tuple[str, ...]
    engine_secret: str
    workers_secret: str

    @property
    def serves(self) -> bool:
        return _serves(self.job.config, self.job.mode)

    @property
    def file(self) -> Path:
        return self.job.folder / f"job-{self._name}.json"

    @property
    def lock(self) -> Path:
        return self.job.folder / f".{self._name}.lock"

    def publish(self) -> None:
        """Write the job file, and the address of separately started workers."""
        job = self.job
        job.write(self.file.name)
        if job.mode == "workers" and job.config.node_rank == 0:
            address = job.workers_address
            is_everywhere = parse_host(job.workers_bind) in EVERYWHERE
            if is_everywhere and job.config.engine_connect_host is None:
                # As other machines reach it.
                address = tcp(socket.getfqdn(), parse_port(job.workers_bind))
            write_secret(job.folder / WORKERS_SECRET, self.workers_secret)
            write_secret(job.folder / WORKERS_ADDRESS, address)

    @property
    def _name(self) -> str:
        # Two servers must not share a folder; workers may share one with a server or other workers.
        return "serving" if self.serves else f"workers-{self.job.config.node_rank}"

    @property
    def secrets(self) -> dict[str, dict[str, str]]:
        """Secrets by process: each gets only the ones that it needs."""
        engine = {env.ENGINE_SECRET: self.engine_secret}
        workers = {env.WORKERS_SECRET: self.workers_secret}
        keys = {env.SERVER_KEYS: ",".join(self.keys)} if self.keys else {}
        return {"api": {**engine, **keys}, "engine": {**engine, **workers}, "workers": workers}


def prepare(config: ServerConfig, mode: Mode, worker_address: str | None = None) -> LaunchPlan:
    """Resolve the model, free ports and secrets. Writes nothing that another server reads.
    `worker_address`: the address of separately started workers. Raises ConfigError for invalid
    settings, and CapabilityError for a model that cannot be downloaded."""
    # For its errors, which are then raised before anything is downloaded.
    to_run_config(config)
    env.require_variables(config.pass_env, "pass_env")
    if worker_address is not None and mode != "connect":
        raise ConfigError(
            f"--worker-address is where workers are that were started by themselves, and --mode is"
            f" {mode}.\n  Leave it out, or write --mode connect."
        )
    if worker_address is not None and not ADDRESS.fullmatch(worker_address):
        raise ConfigError(
            f"--worker-address {worker_address} is no address.\n"
            "  Write one such as tcp://node0:5556."
        )
    if mode == "connect" and config.node_rank:
        raise ConfigError(
            f"node_rank is {config.node_rank}, and clients come to the first machine.\n"
            "  Write --mode connect there alone, and --mode workers here."
        )
    serves = _serves(config, mode)
    keys = read_api_keys(config) if serves else ()
    output_dir = Path(config.output_dir).expanduser().resolve()
    folder = output_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    if mode == "connect":
        bind = address = worker_address or _written(folder / WORKERS_ADDRESS, config)
        # Only waits: `read_secret` also refuses a file that others can read.
        _written(folder / WORKERS_SECRET, config)
        secret = read_secret(folder / WORKERS_SECRET)
    else:
        bind = workers_bind(config, alone=mode == "workers")
        address = workers_address(config, bind)
        # A scheduler that is connected knows only the secret of workers that ran here before.
        secret_file = folder / WORKERS_SECRET
        keeps_secret = mode == "workers" and secret_file.is_file()
        secret = read_secret(secret_file) if keeps_secret else new_secret()
    port = free_port(config.api_host, config.api_port, "api_port") if serves else config.api_port
    typed = config.config_path or config.model_path
    config_path = _local(typed, pin_config(typed), MODEL_FILES)
    typed = config.tokenizer_path or typed
    tokenizer = _local(typed, pin_tokenizer(typed), TOKENIZER_AND_CONFIG)
    job = ServerJob(
        config=config,
        mode=mode,
        output_dir=output_dir,
        config_path=config_path,
        weights=_weights(config.model_path),
        tokenizer=tokenizer,
        api_host=config.api_host,
        api_port=port,
        engine_address=tcp(LOOPBACK, free_port(LOOPBACK, 0, "the engine's port")),
        workers_bind=bind,
        workers_address=address,
        # Separately started workers do not know the keys, but must know whether there are any.
        requires_keys=bool(keys or config.api_keys_file),
        image_processor=_image_processor(config, config_path, tokenizer),
    )
    return LaunchPlan(job, keys, new_secret(), secret)


def read_api_keys(config: ServerConfig) -> tuple[str, ...]:
    """The API keys. Raises ConfigError if they are required and missing."""
    keys = env.server_keys()
    if config.api_keys_file is not None:
        path = Path(config.api_keys_file).expanduser()
        require_private(path)
        lines = map(str.strip, path.read_text(encoding="utf-8").splitlines())
        keys = tuple(line for line in lines if line and not line.startswith("#"))
        if any("," in key for key in keys):
            raise ConfigError(f"{path} has a key with a comma.\n  Write one key on each line.")
        if not keys:
            raise ConfigError(f"{path} has no keys.\n  Write one on each line.")
    if not keys and not is_loopback_host(config.api_host):
        raise ConfigError(
            f"api_host is {config.api_host}, which other machines reach, and there are no keys.\n"
            f"  Write api_keys_file, or set {env.SERVER_KEYS}; or leave api_host at {LOOPBACK}."
        )
    return keys


def _serves(config: ServerConfig, mode: Mode) -> bool:
    return mode != "workers" and config.node_rank == 0


def _written(path: Path, config: ServerConfig) -> str:
    """The line in a file that another process is about to write."""
    seconds = config.worker_connection_timeout
    deadline = time.monotonic() + seconds
    while not path.is_file():
        if time.monotonic() > deadline:
            raise ConfigError(
                f"no workers have published their address: {path} does not exist after"
                f" {seconds:.0f} s.\n"
                "  Start them with --mode workers and the same output_dir, or set --worker-address."
            )
        time.sleep(0.2)
    return path.read_text(encoding="ascii").strip()


def _local(typed: str, source: Source, patterns: Sequence[str]) -> str:
    """`builtin:<name>` as it is, else a local folder."""
    if source.pin["kind"] == "builtin":
        return typed
    return str(local_folder(typed, source, patterns).resolve())


def _image_processor(config: ServerConfig, config_path: str, tokenizer: str) -> str:
    """The folder of the image processor of a model that takes images; empty for others. Raises
    ConfigError if there is none."""
    file = Path(config_path) / "config.json"
    model_type = read_json_object(file).get("model_type") if file.is_file() else None
    if model_type not in VISION_TYPES or config.backend == "transformers":
        return ""
    # Those of videos alone are none.
    if not any((Path(tokenizer) / name).is_file() for name in PROCESSOR_FILES[:2]):
        raise ConfigError(
            f"{config.model_path} is a {model_type}, which takes images, and {tokenizer} has no"
            " image processor.\n"
            f"  Put {PROCESSOR_FILES[0]} beside its tokenizer, or write a tokenizer_path with one."
        )
    return tokenizer


def _weights(typed: str) -> Path | None:
    if typed.startswith("builtin:"):
        return None
    path = Path(typed).expanduser()
    if is_url(typed) or not path.exists():
        return local_folder(typed, pin_model(typed)).resolve()
    # Weights are not part of a cache key here, so they need not be read before the workers read
    # them.
    if not any(path.glob("*.safetensors")):
        raise ConfigError(
            f"model_path {typed} holds no *.safetensors.\n"
            "  Weights in other formats (.bin, .pt) are not read; save the model as safetensors."
        )
    return path.resolve()
