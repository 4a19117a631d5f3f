"""The flat names of a run's fields in the config of a training server (xorl's).

Data and learning rates come from clients while the server runs. Fields that concern the server
itself have no counterpart in a run.
"""

from collections.abc import Mapping
from typing import Any

from penstock.config.schema.cache_key import CacheKey
from penstock.config.schema.data import DataConfig
from penstock.config.schema.lora import LoraConfig
from penstock.config.schema.model import ModelConfig
from penstock.config.schema.served import AS_IN_A_RUN, served_fields
from penstock.config.schema.train import TrainConfig
from penstock.config.server.serving import ServerServing
from penstock.config.translate import rule
from penstock.config.translate.dialect import Dialect, Values, is_flat
from penstock.config.translate.translation import Entry, Rule

# Prefix of models with random weights.
BUILT_IN = "builtin:"

SERVED = tuple(
    served_fields(model=ModelConfig, train=TrainConfig, lora=LoraConfig, data=DataConfig)
)

# A server's settings to those of a run.
SAME: Mapping[str, str] = {
    **{name: run_name for name, run_name, _, _ in SERVED},
    **{name: f"model.{name}" for name in ("config_path", "tokenizer_path", "backend", "encoders")},
    **{name: f"train.{name}" for name in ("pipeline_parallel_schedule", "optimizer", "output_dir")},
    **{name: f"launch.{name}" for name in ("nnodes", "node_rank")},
    "sample_packing_sequence_len": "data.sample_packing_sequence_len",
}

# Reasons why a field has no counterpart in a run, unless `COMPUTED` has a rule for it.
OF_THE_SERVER: Mapping[str, str] = {
    **dict.fromkeys(ServerServing.model_fields, "of the server: a run serves nobody"),
    **{
        name: "of the server: how its processes reach one another"
        for name in ServerServing.model_fields
        if name.startswith(("worker_", "engine_"))
    },
    "model_name": "of the server: what clients call the model",
    "storage_limit": "of the server: train.save_total_limit bounds what a run keeps",
    "idle_session_timeout": "of the server: a run has no sessions",
    "skip_initial_checkpoint": "of the server: a run saves nothing before its first step",
    "log_level": "of the server",
    "enable_self_test": "of the server: a run is tried by its first step",
    "sync_inference_method": "of the server: a run sends no weights while it trains",
    "sync_allowed_hosts": "of the server: a run sends no weights while it trains",
}


def _strategy(entry: Entry) -> None:
    strategies = {"sequential": "sequential", "best_fit": "multipack", "balanced_dp": "multipack"}
    rule.choice("data.sample_packing_method", strategies)(entry)
    if entry.value == "balanced_dp":
        entry.approximated("rows are filled well, and replicas share them out as they come")


COMPUTED: Mapping[str, Rule] = {
    "model_path": rule.when(
        lambda entry: not entry.value.startswith(BUILT_IN),
        rule.put("model.model_path"),
        rule.when(
            lambda entry: not entry.get("config_path"),
            rule.put("model.config_path"),
            "config_path says which model starts from the seed",
        ),
    ),
    "load_weights_mode": rule.when(
        lambda entry: entry.value == "dcp",
        lambda entry: entry.refuse(
            "weights are read in Hugging Face's format; write auto or safetensors"
        ),
        "weights are read from safetensors wherever they are",
    ),
    "enable_packing": rule.when(
        lambda entry: not entry.value,
        rule.approximated("samples share rows all the same, and do not see one another there"),
        "samples share rows",
    ),
    "sample_packing_strategy": _strategy,
    "load_checkpoint_path": rule.put("train.load_checkpoint_path", lambda path: path or None),
    "ckpt_manager": rule.choice("train.ckpt_manager", {"dcp": "dcp"}),
    "nproc_per_node": rule.when(
        lambda entry: entry.value != "auto",
        rule.put("launch.nproc_per_node"),
        "as many as the parallel sizes multiply to",
    ),
    "master_addr": lambda entry: entry.put(
        "launch.rdzv_endpoint", f"{entry.value}:{entry.get('master_port', 29500)}"
    ),
    "master_port": rule.when(
        lambda entry: entry.get("master_addr"),
        rule.decides("launch.rdzv_endpoint"),
        "there is no master_addr",
    ),
    "log_gradient_norms": rule.choice("train.log_grad_norm", {True: "layers", False: True}),
}

# Settings whose defaults differ from those of a run, and are applied like written values.
OWN_DEFAULTS = frozenset(
    {"output_dir", *(name for name, _, served, _ in SERVED if served.default is not AS_IN_A_RUN)}
)

# Those of them that change results.
DEFAULTS: Mapping[str, Any] = {
    "output_dir": "outputs",
    **{
        name: served.default
        for name, _, served, field in SERVED
        if name in OWN_DEFAULTS
        and any(isinstance(part, CacheKey) and part.role != "never" for part in field.metadata)
    },
}

IDLE = {key: why for key, why in OF_THE_SERVER.items() if key not in SAME and key not in COMPUTED}
UNMISTAKABLE = {*SAME, *COMPUTED, *IDLE} - {"model_path"}


def _recognizes(values: Values) -> bool:
    # Whether a file has `model_path` and another field of a server at the top. A file with data
    # sets is a run's whose sections were left out.
    is_run = "datasets" in values
    has_server_fields = "model_path" in values and bool(UNMISTAKABLE & values.keys())
    return is_flat(values) and has_server_fields and not is_run


SERVER = Dialect(
    name="server",
    title="a training server",
    recognizes=_recognizes,
    same=SAME,
    computed=COMPUTED,
    idle=IDLE,
    defaults=DEFAULTS,
    placeholders={"data.datasets": [{"path": "dummy"}]},
)
