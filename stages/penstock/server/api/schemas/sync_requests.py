"""Bodies of requests about inference servers that weights are sent to: xorl's dialect alone."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from penstock.server.api.checkpoint_uris import ModelName
from penstock.server.api.schemas.requests import Body, Host, Port, Text
from penstock.server.protocol import types

Quantization = Annotated[
    dict[Text, str | int | float | bool | Annotated[list[str | int], Field(max_length=1000)]],
    Field(max_length=64),
]
"""As `quantization_config` in Hugging Face's config.json."""
Megabytes = Annotated[int, Field(ge=1, le=1 << 20)]


def parse_quantization(said: Quantization | None) -> types.Quantization | None:
    """The same, as workers are told: lists of numbers as they are, and others written out."""
    told: types.Quantization = {}
    for name, value in (said or {}).items():
        if isinstance(value, list):
            numbers = tuple(part for part in value if isinstance(part, int))
            told[name] = numbers if len(numbers) == len(value) else str(value)
        else:
            told[name] = value
    return None if said is None else told


class EndpointBody(Body):
    """An inference server; with `sync_weights` the weights of the model `default` are sent now."""

    host: Host
    port: Annotated[int, Field(ge=1, le=65535)]
    worker_port: Port | None = None
    world_size: Annotated[int, Field(ge=1, le=65536)] = 1
    """Where it is not sent, what the server says of itself."""
    pool: Text = "default"
    api_key: Annotated[str, StringConstraints(min_length=1, max_length=1000)] | None = None
    """What the server asks of its own clients; it is kept, and told to nobody else."""
    receiver_kv_cache_dtype: Literal["auto"] | None = None
    sync_weights: bool = False
    master_address: Host | Literal[""] | None = None
    master_port: Port = 0
    group_name: Text = "weight_sync_group"
    buffer_size_mb: Megabytes = 1024


class RemoveEndpointBody(Body):
    """An inference server that is sent nothing any more."""

    host: Host
    port: Annotated[int, Field(ge=1, le=65535)]


class SyncBody(Body):
    """Weights to send."""

    model_id: ModelName | None = None
    master_address: Host | Literal[""] = ""
    master_port: Port = 0
    group_name: Text = "weight_sync_group"
    buffer_size_mb: Megabytes = 1024
    flush_cache: bool = False
    cache_invalidation_mode: Literal["auto", "flush", "none"] = "auto"
    pause_mode: Literal["retract", "abort", "in_place"] = "retract"
    weight_version: Text | None = None
    quantization: Quantization | None = None
    pools: Annotated[list[Text], Field(max_length=64)] | None = None


class QuantizationBody(Body):
    """How weights are sent where a request to send them does not say."""

    quantization: Quantization | None = None
