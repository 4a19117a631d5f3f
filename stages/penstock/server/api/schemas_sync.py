"""Bodies of requests about inference servers that weights are sent to: xorl's dialect alone."""

from typing import Annotated, Literal

from pydantic import Field

from penstock.server.api.paths import ModelName
from penstock.server.api.schemas import Body, Host, Port, Text

Quantization = Annotated[dict[Text, str | int | float | bool], Field(max_length=64)]
Megabytes = Annotated[int, Field(ge=1, le=1 << 20)]


class EndpointBody(Body):
    """An inference server; with `sync_weights` the weights of the model `default` are sent now."""

    host: Host
    port: Annotated[int, Field(ge=1, le=65535)]
    worker_port: None = None
    world_size: Annotated[int, Field(ge=1, le=65536)] = 1
    pool: Text = "default"
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
