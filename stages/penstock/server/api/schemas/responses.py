"""Response bodies, as documented in the OpenAPI document."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class ResponseModel(BaseModel):
    """Base class of all response bodies."""

    model_config = ConfigDict(protected_namespaces=(), from_attributes=True)


class ErrorResponse(ResponseModel):
    """Body of every error."""

    error: str
    category: Literal["user", "server", "unknown"]
    code: str
    detail: list[dict[str, Any]] | None = None
    """Validation errors of the body, each with its location."""


class FutureResponse(ResponseModel):
    """The future of a submitted request."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


class ClientConfigResponse(ResponseModel):
    """Settings of the SDK."""

    pjwt_auth_enabled: bool = False
    proto_compress_fwdbwd: bool = True
    use_pyqwest_transport: bool = False
    parallel_fwdbwd_chunks: bool = True
    fwdbwd_max_chunk_len: int = 1024
    fwdbwd_max_chunk_bytes_count: int = 5_000_000
    sample_max_concurrent_requests: int
    sample_use_retrieve_futures: bool = False
    custom_loss_server_side: bool = False
    sample_join_sampling_session: bool = False


class DynamicConfigResponse(ResponseModel):
    """Settings of the SDK that may change while a client is connected."""

    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = True
    sample_cancel_max_batch_size: int = 64


class CreateSessionResponse(ResponseModel):
    """The created session."""

    type: Literal["create_session"] = "create_session"
    session_id: str
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None


class HeartbeatResponse(ResponseModel):
    """Confirms a heartbeat."""

    type: Literal["session_heartbeat"] = "session_heartbeat"
    session_id: str


class TelemetryResponse(ResponseModel):
    """Confirms telemetry, which is dropped."""

    status: Literal["accepted"] = "accepted"


class LiveResponse(ResponseModel):
    """Liveness of the API process."""

    status: Literal["ok"] = "ok"


class HealthResponse(ResponseModel):
    """Readiness of the server."""

    status: Literal["healthy", "starting", "down", "failed", "unreachable"]
    engine_running: bool
    workers: Literal["ready", "starting", "down", "failed", "unreachable"]
    reason: str = ""
    active_requests: int
    total_requests: int


class SupportedModel(ResponseModel):
    """A base model that can be trained."""

    model_name: str
    max_context_length: int
    trainable: bool
    sampleable: bool


class CapabilitiesResponse(ResponseModel):
    """The served base models."""

    supported_models: list[SupportedModel]


class ModelData(ResponseModel):
    """Architecture, name and tokenizer of a model."""

    arch: str
    model_name: str
    tokenizer_id: str


class InfoResponse(ResponseModel):
    """Metadata of a model."""

    type: Literal["get_info"] = "get_info"
    model_id: str
    is_lora: bool
    lora_rank: int | None
    model_name: str
    model_data: ModelData


class SessionResponse(ResponseModel):
    """The models and samplers of a session."""

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str]
    display_name: str | None = None


class SessionsResponse(ResponseModel):
    """The owner's sessions."""

    sessions: list[str]


class SessionInfoResponse(ResponseModel):
    """Open sessions and loaded models (xorl). There are no adapter slots: `max_training_adapters`
    is 0 and `current_training_adapter` null."""

    registered_models: list[str]
    active_sessions: int
    session_activity: dict[str, float]
    """Time of the last request of each loaded model, in seconds since the epoch."""
    idle_timeout_seconds: float
    loaded_sampling_adapters: dict[str, int] = {}
    loaded_training_adapters: list[str]
    max_training_adapters: int = 0
    current_training_adapter: str | None = None


class RemovedResponse(ResponseModel):
    """Confirms the removal of an inference server."""

    success: bool
    message: str


class KillSessionResponse(RemovedResponse):
    """The unloaded model and its last checkpoint."""

    checkpoint_path: str | None = None


class CheckpointResponse(ResponseModel):
    """A checkpoint: `tinker_path` for the SDK, `path` with the scheme of the model's client."""

    checkpoint_id: str
    checkpoint_type: Literal["training", "sampler"]
    time: str
    path: str
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    expires_at: str | None = None
    user_metadata: dict[str, str] | None = None


class CursorResponse(ResponseModel):
    """Position of a page."""

    offset: int
    limit: int
    total_count: int


class CheckpointsResponse(ResponseModel):
    """Checkpoints, newest first."""

    checkpoints: list[CheckpointResponse]
    cursor: CursorResponse | None = None


class DeletedResponse(ResponseModel):
    """Confirms the deletion of a checkpoint."""

    success: bool
    deleted_path: str | None = None
    error: str | None = None


class RunResponse(ResponseModel):
    """A model that is or was trained."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    corrupted: bool
    lora_rank: int | None
    last_request_time: str
    last_checkpoint: CheckpointResponse | None
    last_sampler_checkpoint: CheckpointResponse | None
    user_metadata: dict[str, str] | None


class RunsResponse(ResponseModel):
    """A page of training runs."""

    training_runs: list[RunResponse]
    cursor: CursorResponse


class LoraResponse(ResponseModel):
    """LoRA config with xorl's field names."""

    lora_rank: int
    lora_alpha: float


class WeightsResponse(ResponseModel):
    """Base model and LoRA config of a checkpoint; null: as in the server config."""

    base_model: str
    is_lora: bool
    lora_rank: int | None = None
    lora_config: LoraResponse | None = None
    train_attn: bool | None = None
    train_mlp: bool | None = None
    train_unembed: bool | None = None


class SamplerResponse(ResponseModel):
    """The model of a sampler."""

    sampler_id: str
    base_model: str
    model_path: str | None = None


class CreateSamplerResponse(ResponseModel):
    """The created sampler: the SDK reads `sampling_session_id`, xorl's clients the other fields."""

    type: Literal["create_sampling_session"] = "create_sampling_session"
    sampling_session_id: str | None = None
    success: bool = True
    model_path: str | None = None
    lora_name: str | None = None
    message: str | None = None


class Endpoint(ResponseModel):
    """An inference server."""

    host: str
    port: int
    world_size: int = 1
    pool: str = "default"


class EndpointResponse(RemovedResponse):
    """The registered inference server, and whether weights were sent to it."""

    endpoint: Endpoint | None = None
    weights_synced: bool = False
    sync_message: str | None = None


class EndpointsResponse(ResponseModel):
    """The registered inference servers."""

    endpoints: list[Endpoint]
    count: int


class EndpointSynced(ResponseModel):
    """An inference server that received weights."""

    host: str
    port: int
    success: bool = True
    message: str = ""


class SyncedResponse(RemovedResponse):
    """Result of a weight sync."""

    transfer_time: float
    total_bytes: int
    num_parameters: int
    num_buckets: int
    cache_invalidation_mode: Literal["auto", "flush", "none"]
    flush_cache: bool
    endpoints_synced: list[EndpointSynced]


class QuantizationResponse(ResponseModel):
    """The default quantization of weight syncs."""

    quantization: dict[str, str | int | float | bool | list[str | int]] | None
    message: str
