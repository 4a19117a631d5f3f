"""Request bodies of weight sync (xorl API)."""

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


def parse_quantization(quantization: Quantization | None) -> types.Quantization | None:
    """Convert to the type of the protocol: lists of integers to tuples, other lists to strings."""
    converted: types.Quantization = {}
    for name, value in (quantization or {}).items():
        if isinstance(value, list):
            numbers = tuple(part for part in value if isinstance(part, int))
            converted[name] = numbers if len(numbers) == len(value) else str(value)
        else:
            converted[name] = value
    return None if quantization is None else converted


class EndpointBody(Body):
    """Register an inference server; with `sync_weights`, also sync the model `default` to it."""

    host: Host
    port: Annotated[int, Field(ge=1, le=65535)]
    worker_port: Port | None = None
    world_size: Annotated[int, Field(ge=1, le=65536)] = 1
    """Default: as reported by the server."""
    pool: Text = "default"
    api_key: Annotated[str, StringConstraints(min_length=1, max_length=1000)] | None = None
    """The API key of the inference server; it is stored and never returned."""
    receiver_kv_cache_dtype: Literal["auto"] | None = None
    sync_weights: bool = False
    master_address: Host | Literal[""] | None = None
    master_port: Port = 0
    group_name: Text = "weight_sync_group"
    buffer_size_mb: Megabytes = 1024


class RemoveEndpointBody(Body):
    """Unregister an inference server."""

    host: Host
    port: Annotated[int, Field(ge=1, le=65535)]


class SyncBody(Body):
    """Sync the weights of a model."""

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
    """Default quantization of sync requests that set none."""

    quantization: Quantization | None = None
