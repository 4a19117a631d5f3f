"""The config of a training server: one flat file, with xorl's field names and some of Penstock.

The settings of training become a `RunConfig` for the workers (`to_run_config`); the server's
processes read the rest.
"""

import math
import re
from dataclasses import replace
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from penstock.config.loading.fault import ConfigIssue, Issues, dotted
from penstock.config.loading.validate import ValidationResult, depends_on_invalid, validate
from penstock.config.schema.base import PATH, require
from penstock.config.schema.data import LONGEST_ROW
from penstock.config.schema.run import RunConfig
from penstock.config.server.run_fields import BUILT_IN, OWN_DEFAULTS, SAME, SERVER
from penstock.config.server.serving import ServerServing
from penstock.config.server.training import ServerModel, ServerTraining
from penstock.config.translate.translation import put_at
from penstock.core.errors import ConfigError
from penstock.core.remote.urls import is_url, redact

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
SIZE = re.compile(r"(\d{1,400}(?:\.\d{1,400})?)\s*([KMGTP]?)(i?)B?", re.IGNORECASE | re.ASCII)

# Sizes whose product is the number of ranks.
AXES = (
    *("data_parallel_shard_size", "data_parallel_replicate_size", "tensor_parallel_size"),
    *("pipeline_parallel_size", "ulysses_parallel_size", "ringattn_parallel_size"),
)

# Settings that apply whatever the optimizer in the file is: a client may request Muon.
MUON = tuple(key for key in SAME if key.startswith("muon_"))

# Settings of a run, and their names in a server's file.
HERE = {
    **{name: key for key, name in SAME.items()},
    "model.model_path": "model_path",
    "train.load_checkpoint_path": "load_checkpoint_path",
    "train.log_grad_norm": "log_gradient_norms",
    "launch.nproc_per_node": "nproc_per_node",
    "launch.rdzv_endpoint": "master_addr",
}


class ServerConfig(ServerServing, ServerTraining, ServerModel):
    """The config of a training server."""

    output_dir: Annotated[str, PATH] = Field(default="outputs", min_length=1)
    """Folder for checkpoints, logs and the server's state. With several nodes it must be on a
    shared file system."""

    load_weights_mode: Annotated[
        Literal["auto", "safetensors", "dcp"],
        require(
            lambda mode: mode != "dcp",
            "is dcp; a DCP folder tells neither its model's architecture nor which tensors are the"
            " base's and which an adapter's: write auto or safetensors, with a folder that"
            " `penstock export` has written, or name the checkpoint in load_checkpoint_path",
        ),
    ] = "auto"
    """Format of the weights in `model_path`: Hugging Face's. `dcp` is an error."""

    ckpt_manager: Annotated[
        Literal["dcp", "torch"],
        require(
            lambda manager: manager == "dcp",
            "is torch; one file of torch.save needs all weights on one rank, is read by"
            " unpickling, and fits no other layout: write dcp",
        ),
    ] = "dcp"
    """Checkpoint format: `dcp`, PyTorch Distributed Checkpoint. `torch` is an error."""

    load_checkpoint_path: Annotated[str, PATH] = ""
    """Training checkpoint that every new model starts from. Empty: the base model."""

    storage_limit: str = "10TB"
    """Maximum size of `output_dir`, such as `10GB` or `500MB` (powers of ten; `GiB` and `MiB` are
    powers of two). A save that would exceed it fails before anything is written."""

    skip_initial_checkpoint: bool = False
    """Do not save a new model before its first step (as `000000`)."""

    @field_validator("output_dir")
    @classmethod
    def _is_a_folder(cls, value: str) -> str:
        if is_url(value):
            raise ValueError(
                f"is {redact(value)}; a server keeps its models in a folder of this machine, or of"
                " a file system that is mounted here: write its path"
            )
        return value

    @field_validator("storage_limit")
    @classmethod
    def _is_a_size(cls, value: str) -> str:
        parse_byte_size(value)
        return value

    @property
    def storage_limit_bytes(self) -> int:
        return parse_byte_size(self.storage_limit)

    @property
    def base_names(self) -> tuple[str, ...]:
        """Names that clients may use for the base model; the first one is the main one."""
        return tuple(dict.fromkeys((self.model_name or self.model_path, self.model_path)))

    @property
    def num_workers(self) -> int | Literal["auto"]:
        if self.nproc_per_node != "auto":
            return self.nproc_per_node
        mode, *sizes = (getattr(self, name) for name in ("data_parallel_mode", *AXES))
        filled = [
            1 if axis == "data_parallel_replicate_size" and size == -1 and mode != "ddp" else size
            for axis, size in zip(AXES, sizes, strict=True)
        ]
        if -1 in filled:
            return "auto"
        return max(1, math.prod(filled) // self.nnodes)


def parse_byte_size(text: str) -> int:
    """The bytes of `10GB` or `500 MiB`.

    Raises ValueError for any other text.
    """
    match = SIZE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"is {text!r}; write a size such as 10GB, 500MB or 2TiB")
    number, unit, binary = match.groups()
    scale = UNITS[unit.upper()]
    if binary:
        scale = 1024 ** list(UNITS).index(unit.upper())
    # Exact: the product of a float may lie just below the whole number.
    return int(Fraction(number) * scale)


def validate_server(config: ServerConfig) -> ValidationResult:
    """The run whose settings the workers have, and what is said of it, under the names here."""
    of_run = validate(_run_values(config))
    # Beside another optimizer a run refuses them; here a client may request Muon.
    muon = {key: getattr(config, key) for key in MUON if key in config.model_fields_set}
    train = of_run.run.train.model_copy(update=muon)
    faults = list(_machines_can_meet(config))
    faults += [
        fault for fault in map(_here, of_run.faults) if not depends_on_invalid(fault, faults)
    ]
    # Clients choose the learning rate of each step.
    notices = [
        f"{HERE.get(name, name)}{colon}{_in_names_here(text)}"
        for name, colon, text in (notice.partition(":") for notice in of_run.notices)
        if name != "train.lr"
    ]
    return ValidationResult(of_run.run.model_copy(update={"train": train}), faults, notices)


def to_run_config(config: ServerConfig) -> RunConfig:
    """The `RunConfig` of the workers: model, layout, precision, optimizer, adapters.

    Its data and learning rate are placeholders: those come from clients. Raises ConfigError with a
    line for each error.
    """
    result = validate_server(config)
    if result.faults:
        lines = (f"{dotted(fault.path)}: {fault.text}" for fault in result.faults)
        raise ConfigError("\n".join(lines))
    return result.run


def _machines_can_meet(config: ServerConfig) -> Issues:
    if config.nnodes > 1 and config.master_addr is None:
        yield ConfigIssue(
            ("master_addr",),
            f"{config.nnodes} nodes need a rendezvous address;"
            " write the host name or address of the first node",
            ("nnodes",),
        )


def _here(fault: ConfigIssue) -> ConfigIssue:
    # A run's fault as one of what stands in a server's file.
    steps = dotted(fault.path).split(".")
    parts = (".".join(steps[:length]) for length in range(len(steps), 0, -1))
    name = next((HERE[part] for part in parts if part in HERE), None)
    reads = tuple(HERE.get(setting, setting) for setting in fault.reads)
    if name is None:
        return replace(fault, text=_in_names_here(fault.text), reads=reads)
    origin = f" (of a run: {'.'.join(steps)})" if name != steps[-1] else ""
    return ConfigIssue((name,), _in_names_here(fault.text) + origin, reads)


def _in_names_here(text: str) -> str:
    return re.sub(r"\b[a-z]+\.[a-z]\w+", lambda name: HERE.get(name[0], name[0]), text)


def _run_values(config: ServerConfig) -> dict[str, Any]:
    # Only what was written, and defaults that change results: a default that this machine does not
    # support may be replaced, a written value may not.
    is_built_in = config.model_path.startswith(BUILT_IN)
    values: dict[str, Any] = {}
    put_at(values, f"model.{'config' if is_built_in else 'model'}_path", config.model_path)
    applied = {*config.model_fields_set, *OWN_DEFAULTS}
    for key, name in SAME.items():
        if key == "config_path" and config.config_path is None:
            continue
        value = getattr(config, key)
        if key == "sample_packing_sequence_len" and value == LONGEST_ROW:
            continue  # as it is where it is left out
        if key in applied and (key not in MUON or config.optimizer == "muon"):
            put_at(values, name, value)
    if config.load_checkpoint_path:
        put_at(values, "train.load_checkpoint_path", config.load_checkpoint_path)
    put_at(values, "train.log_grad_norm", "layers" if config.log_gradient_norms else True)
    for name, value in SERVER.placeholders.items():
        put_at(values, name, value)
    put_at(values, "launch.nproc_per_node", config.num_workers)
    if config.master_addr:
        put_at(values, "launch.rdzv_endpoint", f"{config.master_addr}:{config.master_port}")
    return values
