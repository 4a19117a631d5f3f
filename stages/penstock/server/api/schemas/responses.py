"""Bodies of answers, as the OpenAPI document tells them."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class ResponseModel(BaseModel):
    """What every answer keeps to."""

    model_config = ConfigDict(protected_namespaces=())


class ErrorResponse(ResponseModel):
    """Every error, whatever its status."""

    error: str
    category: Literal["user", "server", "unknown"]
    code: str
    detail: list[dict[str, Any]] | None = None
    """Faults of the body, each with its place."""


class FutureResponse(ResponseModel):
    """What to come back with."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


class ClientConfigResponse(ResponseModel):
    """How the SDK is to behave here."""

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
    """What of that may change while a client lives."""

    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = True
    sample_cancel_max_batch_size: int = 64


class CreateSessionResponse(ResponseModel):
    """A session that began."""

    type: Literal["create_session"] = "create_session"
    session_id: str
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None


class HeartbeatResponse(ResponseModel):
    """It was heard."""

    type: Literal["session_heartbeat"] = "session_heartbeat"
    session_id: str


class TelemetryResponse(ResponseModel):
    """It was heard; nothing of it is kept."""

    status: Literal["accepted"] = "accepted"


class LiveResponse(ResponseModel):
    """The process answers."""

    status: Literal["ok"] = "ok"


class HealthResponse(ResponseModel):
    """Whether work can be done."""

    status: Literal["healthy", "starting", "down", "failed", "unreachable"]
    engine_running: bool
    workers: Literal["ready", "starting", "down", "failed", "unreachable"]
    reason: str = ""
    active_requests: int
    total_requests: int


class SupportedModel(ResponseModel):
    """A model that can be trained."""

    model_name: str
    max_context_length: int
    trainable: bool
    sampleable: bool


class CapabilitiesResponse(ResponseModel):
    """What is served."""

    supported_models: list[SupportedModel]


class ModelData(ResponseModel):
    """What a model is."""

    arch: str
    model_name: str
    tokenizer_id: str


class InfoResponse(ResponseModel):
    """One model."""

    type: Literal["get_info"] = "get_info"
    model_id: str
    is_lora: bool
    lora_rank: int | None
    model_name: str
    model_data: ModelData


class SessionResponse(ResponseModel):
    """What belongs to a session."""

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str]
    display_name: str | None = None


class SessionsResponse(ResponseModel):
    """The owner's sessions."""

    sessions: list[str]


class SessionInfoResponse(ResponseModel):
    """What is open (xorl). Adapters take no places of a known number here, none of which is the
    current one."""

    registered_models: list[str]
    active_sessions: int
    session_activity: dict[str, float]
    """When each open model was last asked of, in seconds since the epoch."""
    idle_timeout_seconds: float
    loaded_sampling_adapters: dict[str, int] = {}
    loaded_training_adapters: list[str]
    max_training_adapters: int = 0
    current_training_adapter: str | None = None


class KillSessionResponse(ResponseModel):
    """A model that was unloaded."""

    success: bool
    message: str
    checkpoint_path: str | None = None


class CheckpointResponse(ResponseModel):
    """One that is kept: `tinker_path` for the SDK, `path` as its model's client writes it."""

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
    """Where a page is."""

    offset: int
    limit: int
    total_count: int


class CheckpointsResponse(ResponseModel):
    """Those that are kept, the newest first."""

    checkpoints: list[CheckpointResponse]
    cursor: CursorResponse | None = None


class DeletedResponse(ResponseModel):
    """A checkpoint that is gone."""

    success: bool
    deleted_path: str | None = None
    error: str | None = None


class RunResponse(ResponseModel):
    """A model that is trained, or was."""

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
    """A page of them."""

    training_runs: list[RunResponse]
    cursor: CursorResponse


class LoraResponse(ResponseModel):
    """An adapter, in xorl's words."""

    lora_rank: int
    lora_alpha: float


class WeightsResponse(ResponseModel):
    """What a checkpoint is of; null: as the server's file says."""

    base_model: str
    is_lora: bool
    lora_rank: int | None = None
    lora_config: LoraResponse | None = None
    train_attn: bool | None = None
    train_mlp: bool | None = None
    train_unembed: bool | None = None


class SamplerResponse(ResponseModel):
    """What a sampler samples from."""

    sampler_id: str
    base_model: str
    model_path: str | None = None


class CreateSamplerResponse(ResponseModel):
    """A sampler: the SDK reads `sampling_session_id`, xorl's clients the rest."""

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


class EndpointResponse(ResponseModel):
    """One that weights are sent to from now on."""

    success: bool
    message: str
    endpoint: Endpoint | None = None
    weights_synced: bool = False
    sync_message: str | None = None


class RemovedResponse(ResponseModel):
    """One that is sent nothing any more."""

    success: bool
    message: str


class EndpointsResponse(ResponseModel):
    """All of them."""

    endpoints: list[Endpoint]
    count: int


class EndpointSynced(ResponseModel):
    """One that was sent weights."""

    host: str
    port: int
    success: bool = True
    message: str = ""


class SyncedResponse(ResponseModel):
    """Weights that were sent."""

    success: bool
    message: str
    transfer_time: float
    total_bytes: int
    num_parameters: int
    num_buckets: int
    cache_invalidation_mode: Literal["auto", "flush", "none"]
    flush_cache: bool
    endpoints_synced: list[EndpointSynced]


class QuantizationResponse(ResponseModel):
    """How weights are sent from now on."""

    quantization: dict[str, str | int | float | bool | list[str | int]] | None
    message: str
