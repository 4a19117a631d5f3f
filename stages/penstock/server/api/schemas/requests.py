"""Request bodies of both APIs: the Tinker SDK's and xorl's.

Unknown fields are errors, so that nothing a client sets is ignored. Samples and tensors are
validated by `wire.datums` and `wire.tensors`, which have better error messages.
"""

from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, StringConstraints, WithJsonSchema

from penstock.server.api.checkpoint_uris import CheckpointName, ModelName, SessionName, WrittenPath

Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, le=2**31 - 1)]
Scope = Annotated[Literal["owned", "accessible"], Query(alias="access_scope")]
"""Both list what the key's owner owns: public checkpoints of others are read by path and not
listed."""


Seq = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""Sequence number of a request within its model."""
Number = Annotated[int, Field(ge=0, le=2**53)]
"""Number of a model or sampler within its session."""
Integer = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Port = Annotated[int, Field(ge=0, le=65535)]
Text = Annotated[str, StringConstraints(max_length=1000)]
Host = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._:\[\]-]{1,255}$")]
Metadata = Annotated[dict[Text, Any], Field(max_length=64)]
Texts = Annotated[dict[Text, str], Field(max_length=64)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(ge=0, le=1e6)]
Ttl = Annotated[float, Field(gt=0, le=3.2e8)]
"""Seconds until a checkpoint may be deleted; at most ten years."""

Quantization = Annotated[
    dict[Text, str | int | float | bool | Annotated[list[str | int], Field(max_length=1000)]],
    Field(max_length=64),
]
"""As `quantization_config` in Hugging Face's config.json."""
Megabytes = Annotated[int, Field(ge=1, le=1 << 20)]

_NUMBERS = {"type": "array", "items": {"type": "number"}}
_TENSOR = {
    "anyOf": [
        _NUMBERS,
        {"type": "array", "items": _NUMBERS},
        {
            "type": "object",
            "required": ["data"],
            "properties": {
                "data": _NUMBERS,
                "dtype": {"type": "string"},
                "shape": {"type": "array", "items": {"type": "integer"}},
                "sparse_crow_indices": {"type": "array", "items": {"type": "integer"}},
                "sparse_col_indices": {"type": "array", "items": {"type": "integer"}},
            },
        },
    ]
}
_TEXT_CHUNK = {
    "type": "object",
    "properties": {
        "type": {"const": "encoded_text"},
        "tokens": {"type": "array", "items": {"type": "integer"}},
    },
}
_IMAGE_CHUNK = {
    "type": "object",
    "required": ["type", "data", "format"],
    "properties": {
        "type": {"const": "image"},
        "data": {"type": "string", "contentEncoding": "base64"},
        "format": {"enum": ["png", "jpeg"]},
        "expected_tokens": {"type": ["integer", "null"]},
    },
}
_CHUNKS = {"type": "array", "items": {"anyOf": [_TEXT_CHUNK, _IMAGE_CHUNK]}}
Tensors = Annotated[
    dict[str, Any], WithJsonSchema({"type": "object", "additionalProperties": _TENSOR})
]
Input = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {"input_ids": _TENSOR, "chunks": _CHUNKS},
            "additionalProperties": _TENSOR,
        }
    ),
]
Chunks = Annotated[
    # fail_fast: pydantic would make an error of each of 100,000 chunks that are wrong.
    list[dict[str, Any]], Field(max_length=100_000, fail_fast=True), WithJsonSchema(_CHUNKS)
]


class Body(BaseModel):
    """Base class of all request bodies."""

    model_config = ConfigDict(
        extra="forbid",
        allow_inf_nan=False,
        # pydantic warns of fields that begin with `model_`, which are names of these APIs.
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )


class ClientConfigBody(Body):
    """Information about a client."""

    sdk_version: Text = ""


class LoraBody(Body):
    """LoRA config: `rank` is the SDK's name, `lora_rank` and `lora_alpha` are xorl's."""

    rank: Annotated[int, Field(ge=1, le=65536)] | None = None
    lora_rank: Annotated[int, Field(ge=1, le=65536)] | None = None
    lora_alpha: Annotated[
        Annotated[float, Field(gt=0, le=1e6)] | None,
        Field(validation_alias=AliasChoices("lora_alpha", "alpha")),
    ] = None
    seed: Integer | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None


class OptimizerBody(Body):
    """Optimizer of a model, with the default parameters of its steps."""

    type: Literal["adamw", "anyprecision_adamw", "sgd", "muon"] | None = None
    learning_rate: Rate | None = None
    weight_decay: Rate | None = None
    optimizer_dtype: Literal["fp32", "bf16"] | None = None
    betas: tuple[Beta, Beta] | None = None
    eps: Rate | None = None
    optimizer_kwargs: Annotated[dict[Text, bool | float | Text], Field(max_length=64)] | None = None


class CreateSessionBody(Body):
    """Create a session; with `base_model` or `lora_config` (xorl) also a model of the same name."""

    tags: Annotated[list[Text], Field(max_length=64)] = []
    user_metadata: Metadata | None = None
    sdk_version: Text = ""
    display_name: Text | None = None
    session_id: SessionName | None = None
    base_model: Text | None = None
    lora_config: LoraBody | None = None
    type: Literal["create_session"] = "create_session"


class HeartbeatBody(Body):
    """Session heartbeat."""

    session_id: SessionName
    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishBody(Body):
    """End a session, with a reason."""

    reason: dict[str, Any] | None = None
    detail: Text | None = None


class CreateModelBody(Body):
    """Create a model, named by a session and a number (SDK) or by `model_id` (xorl)."""

    session_id: SessionName | None = None
    model_seq_id: Number | None = None
    model_id: ModelName | None = None
    base_model: Text | None = None
    user_metadata: Metadata | None = None
    lora_config: LoraBody | None = None
    optimizer_config: OptimizerBody | None = None
    type: Literal["create_model"] = "create_model"


class ModelBody(Body):
    """One model."""

    model_id: ModelName
    type: Literal["get_info", "unload_model"] | None = None


class KillSessionBody(Body):
    """Unload a model (xorl)."""

    model_id: ModelName
    save_checkpoint: bool = True
    reset_weights: bool = False
    """Has no effect: a new model always starts from the base weights."""


class SampleBody(Body):
    """A sample: `chunks` (SDK) or `input_ids` (xorl), and the per-token loss inputs."""

    model_input: Input
    loss_fn_inputs: Tensors
    type: Literal["datum"] | None = None


class SamplesBody(Body):
    """Samples and their loss function."""

    data: Annotated[list[SampleBody], Field(min_length=1, max_length=65536, fail_fast=True)]
    """Only the first invalid sample is reported."""
    loss_fn: Text = "causallm_loss"
    loss_fn_params: Annotated[
        dict[Text, Any] | None,
        Field(validation_alias=AliasChoices("loss_fn_params", "loss_fn_config")),
    ] = None
    routed_experts: None = None
    routed_expert_logits: None = None


class DropBody(Body):
    """Drop the accumulated gradients."""

    model_id: ModelName = "default"
    seq_id: Seq | None = None


class ForwardBody(DropBody):
    """Forward pass."""

    forward_input: SamplesBody
    type: Literal["forward"] = "forward"


class ForwardBackwardBody(DropBody):
    """Forward and backward pass."""

    forward_backward_input: SamplesBody
    type: Literal["forward_backward"] = "forward_backward"


class AdamBody(Body):
    """Adam parameters of a step."""

    learning_rate: Rate = 1e-4
    beta1: Beta = 0.9
    beta2: Beta = 0.95
    eps: Rate = 1e-12
    weight_decay: Rate = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0, le=1e30)] = 0.0


class StepBody(DropBody):
    """Optimizer step; parameters that are not set default to those of the model (xorl)."""

    adam_params: AdamBody | None = None
    learning_rate: Rate | None = None
    gradient_clip: Annotated[float, Field(ge=0, le=1e30)] | None = None
    type: Literal["optim_step"] = "optim_step"


class SaveBody(Body):
    """Save a checkpoint for resuming training."""

    model_id: ModelName = "default"
    path: CheckpointName | None = None
    """Its name."""
    seq_id: Seq | None = None
    ttl_seconds: Ttl | None = None
    user_metadata: Texts | None = None
    overwrite: bool = False
    type: Literal["save_weights"] = "save_weights"


class LoadBody(Body):
    """Load a checkpoint into a model, or into a new model of a session (SDK)."""

    model_id: ModelName | None = None
    seq_id: Seq | None = None
    session_id: SessionName | None = None
    model_seq_id: Number | None = None
    base_model: Text | None = None
    user_metadata: Metadata | None = None
    path: WrittenPath
    optimizer: bool = True
    optimizer_config: OptimizerBody | None = None
    type: Literal["load_weights"] = "load_weights"


class SaveSamplerBody(Body):
    """Save weights for sampling, under a name or as a sampler of a session (SDK)."""

    model_id: ModelName = "default"
    path: CheckpointName | None = None
    name: CheckpointName | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot"] = "snapshot"
    seq_id: Seq | None = None
    ttl_seconds: Ttl | None = None
    user_metadata: Texts | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class CreateSamplerBody(Body):
    """Create a sampler of a session (SDK), or check a path (xorl)."""

    session_id: SessionName | None = None
    sampling_session_seq_id: Number | None = None
    base_model: Text | None = None
    model_path: WrittenPath | None = None
    model_id: ModelName | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class PromptBody(Body):
    """A prompt."""

    chunks: Chunks
    type: Literal["model_input"] | None = None


class SamplingBody(Body):
    """Sampling parameters."""

    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    seed: Integer | None = None
    stop: (
        Text
        | Annotated[list[Text], Field(max_length=64)]
        | Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=64)]
        | None
    ) = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class AsampleBody(Body):
    """Sample completions of a prompt."""

    num_samples: Annotated[int, Field(ge=1, le=1024)] = 1
    prompt: PromptBody
    sampling_params: SamplingBody
    base_model: Text | None = None
    model_path: WrittenPath | None = None
    sampling_session_id: ModelName | None = None
    seq_id: Number | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=1000)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=1000)] = 0
    prompt_alt_tokens_k: Literal[0] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    record_stability_info: Literal[False] | None = None
    type: Literal["sample"] = "sample"


class CancelBody(Body):
    """Cancel a future."""

    request_id: Text


class RetrieveBody(CancelBody):
    """Poll a future. With `allow_metadata_only` (SDK), a pending one returns HTTP 408."""

    allow_metadata_only: bool | None = None


class CheckpointsBody(Body):
    """List the checkpoints of a model (xorl)."""

    model_id: ModelName = "default"


class DeleteCheckpointBody(CheckpointsBody):
    """Delete a checkpoint (xorl)."""

    checkpoint_id: Text


class WeightsInfoBody(Body):
    """Metadata of a checkpoint."""

    tinker_path: WrittenPath | None = None
    xorl_path: WrittenPath | None = None


class TtlBody(Body):
    """Change the expiry time of a checkpoint; null: it never expires."""

    ttl_seconds: Ttl | None


class RemoveEndpointBody(Body):
    """Unregister an inference server."""

    host: Host
    port: Annotated[int, Field(ge=1, le=65535)]


class EndpointBody(RemoveEndpointBody):
    """Register an inference server; with `sync_weights`, also sync the model `default` to it."""

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
