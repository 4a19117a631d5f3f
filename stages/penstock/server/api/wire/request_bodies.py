"""Decode request bodies with samples: forward-backward passes and sampling requests.

Pure functions of bytes. Small bodies are decoded in the event loop, others in a codec process
(`codec_pool`), because decoding holds the GIL and needs much memory.
"""

from typing import Any, Literal, TypeVar

import msgspec
from fastapi.exceptions import RequestValidationError
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ValidationError

from penstock.server.api.checkpoint_uris import read_path, uri_scheme
from penstock.server.api.errors import MAX_VALIDATION_ERRORS, ApiError
from penstock.server.api.middleware.body_limit import (
    JSON,
    PROTOBUF,
    SMALL_WINDOW,
    decompressed,
    parsed_json,
    require_few_keys,
)
from penstock.server.api.schemas.requests import (
    AsampleBody,
    ForwardBackwardBody,
    ForwardBody,
    SamplesBody,
)
from penstock.server.api.wire import tinker_pb2 as pb
from penstock.server.api.wire.chunks import ChunkDecoder, ExpandedImage, ImageExpander
from penstock.server.api.wire.datums import (
    count_values_in_json,
    count_values_in_proto,
    datums_from_json,
    datums_from_proto,
)
from penstock.server.api.wire.decode_params import parse_sampling_params
from penstock.server.api.wire.loss_names import LossSpec, resolve_loss, resolve_xorl_loss
from penstock.server.api.wire.tensors import token_array
from penstock.server.protocol import requests
from penstock.server.protocol.codec import Category, Code
from penstock.server.protocol.types import Datum, LossReduction

B = TypeVar("B", bound=BaseModel)
SampleCall = Literal["forward", "forward_backward", "asample"]

WINDOW = 1 << 27  # Maximum window size in bytes for decompression
MAX_VALUES = 1 << 25  # Maximum number of commas, colons and brackets in a JSON body
MAX_CONTAINERS = 1 << 21  # Maximum number of arrays and objects in a JSON body
MAX_SAMPLES = 65536
INLINE_BYTES = 1 << 16  # Maximum decompressed bytes for decoding in the event loop
INLINE_SAMPLES = 64
INLINE_NUMBERS = 1 << 16
"""Maximum samples, and values with sparse tensors densified, for decoding in the event loop."""


class BodyJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How to decode a body."""

    call: SampleCall
    kind: str  # Its media type
    encoding: str  # `identity` or `zstd`
    max_bytes: int  # Maximum bytes after decompression
    takes_images: bool = False
    request_id: str = ""
    owner: str = ""  # The id and owner of its request


class DecodedBody(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a body besides its request."""

    seq: int | None = None
    forward_only: bool = False
    base_model: str | None = None
    """The base model to sample from, if there is no sampler and no path."""
    retry_key: str = ""  # Idempotency key, if the client's names identify a repeated request
    last_prompt_logprobs: int | None = None
    count: int = 1  # Number of sequences to sample
    model: str | None = None


class BodyError(msgspec.Struct, frozen=True, kw_only=True):
    """A rejected body, passed between processes."""

    error: str
    status: int
    category: Category = "user"
    code: Code = "invalid"
    faults: list[dict[str, Any]] | None = None  # The validation errors
    model_and_seq: dict[str, Any] | None = None
    """The model and sequence number of an invalid request."""


class NotInlineError(Exception):
    """The body is too large to be decoded in the event loop."""


class _NotInline:
    """Takes the place of the image processor in the event loop."""

    has_two_forms = False

    def expand(
        self, content: bytes, format: str, digest: bytes, *, several: bool = False
    ) -> ExpandedImage:
        del content, format, digest, several
        raise NotInlineError


class BodyDecoder:
    """A body being decoded; `model_and_seq` is set as soon as they are read."""

    def __init__(
        self, job: BodyJob, *, is_inline: bool, expander: ImageExpander | None = None
    ) -> None:
        """`is_inline`: raise NotInlineError for a body that takes more than some milliseconds.
        `expander` processes images, where they are taken."""
        self._job, self._is_inline = job, is_inline
        if is_inline and job.takes_images:
            expander = _NotInline()
        self._chunks = ChunkDecoder(expander)
        self.model_and_seq: dict[str, Any] | None = None

    def decode(
        self, packed: bytes
    ) -> tuple[DecodedBody, requests.ForwardBackward | requests.Sample]:
        """Decode the body. Raises ApiError and RequestValidationError."""
        job = self._job
        body = self._decompressed(packed)
        if job.kind == PROTOBUF and job.call == "forward_backward":
            return self._decode_proto_pass(body)
        if job.kind not in (JSON, ""):
            raise RequestValidationError([_NOT_AN_OBJECT])
        parsed = parsed_json(body, MAX_VALUES, MAX_CONTAINERS)
        self.model_and_seq = _find_model_and_seq(parsed)
        match job.call:
            case "forward_backward":
                request = _validated(ForwardBackwardBody, parsed)
                return self._decode_json_pass(request, request.forward_backward_input)
            case "forward":
                request = _validated(ForwardBody, parsed)
                return self._decode_json_pass(request, request.forward_input)
            case "asample":
                return _decode_sample(_validated(AsampleBody, parsed), self._chunks)

    def _decompressed(self, packed: bytes) -> bytes:
        job = self._job
        if not self._is_inline:
            return decompressed(packed, job.encoding, job.max_bytes, WINDOW)
        try:
            limit = min(job.max_bytes, INLINE_BYTES)
            return decompressed(packed, job.encoding, limit, SMALL_WINDOW)
        except ApiError as refusal:
            # The codec process has larger limits, and refuses the body if it must.
            raise NotInlineError from refusal

    def _decode_proto_pass(self, body: bytes) -> tuple[DecodedBody, requests.ForwardBackward]:
        try:
            message = pb.ForwardBackwardRequest.FromString(body)
        except DecodeError as error:
            raise ApiError("the body is no ForwardBackwardRequest") from error
        self.model_and_seq = {"model_id": message.model_id, "seq_id": message.seq_id}
        if message.seq_id < 1:
            raise ApiError(f"seq_id is {message.seq_id}, and the first is 1")
        self._require_samples(len(message.data))
        params: dict[str, float | str] = dict(message.loss_fn_config)
        if message.loss_fn_config_v2:
            params = {
                name: value.text if value.WhichOneof("value") == "text" else value.number
                for name, value in message.loss_fn_config_v2.items()
            }
        if not message.data:
            raise ApiError("there are no samples in the request")
        spec = resolve_loss(message.loss_fn, params)
        self._require_numbers(count_values_in_proto(message.data, spec.loss))
        datums = datums_from_proto(message.data, spec.loss, self._chunks)
        return self._pass(
            message.model_id, message.seq_id, spec, datums, "sum", message.forward_only
        )

    def _decode_json_pass(
        self, request: ForwardBackwardBody | ForwardBody, body: SamplesBody
    ) -> tuple[DecodedBody, requests.ForwardBackward]:
        """A forward-backward pass in JSON. xorl clients use their own model and loss names, and sum
        gradients, which the optimizer step divides by the number of tokens."""
        is_sdk = uri_scheme(request.model_id) == "tinker"
        resolve = resolve_loss if is_sdk else resolve_xorl_loss
        spec = resolve(body.loss_fn, body.loss_fn_params or {})
        self._require_samples(len(body.data))
        data = [(sample.model_input, sample.loss_fn_inputs) for sample in body.data]
        self._require_numbers(count_values_in_json(data, spec.loss))
        datums = datums_from_json(data, spec.loss, self._chunks)
        reduction, forward_only = "sum" if is_sdk else "token", isinstance(request, ForwardBody)
        return self._pass(request.model_id, request.seq_id, spec, datums, reduction, forward_only)

    def _pass(
        self,
        model: str,
        seq: int | None,
        spec: LossSpec,
        datums: tuple[Datum, ...],
        reduction: LossReduction,
        forward_only: bool,
    ) -> tuple[DecodedBody, requests.ForwardBackward]:
        operation = requests.ForwardBackward(
            model=model,
            data=datums,
            images=tuple(self._chunks.images),
            loss=spec.loss,
            params=spec.params,
            forward_only=forward_only,
            loss_reduction=reduction,
        )
        return DecodedBody(seq=seq, forward_only=forward_only, model=model), operation

    def _require_samples(self, count: int) -> None:
        if count > MAX_SAMPLES:
            raise ApiError(f"there are {count} samples; {MAX_SAMPLES} may be", status=413)
        if self._is_inline and count > INLINE_SAMPLES:
            raise NotInlineError

    def _require_numbers(self, count: int) -> None:
        if self._is_inline and count > INLINE_NUMBERS:
            raise NotInlineError


def to_body_error(
    error: ApiError | RequestValidationError, model_and_seq: dict[str, Any] | None
) -> BodyError:
    """The error in a form that can be passed to another process."""
    if isinstance(error, RequestValidationError):
        faults = list(error.errors())
        return BodyError(error="", status=422, faults=faults, model_and_seq=model_and_seq)
    return BodyError(
        error=error.error,
        status=error.status_code,
        category=error.category,
        code=error.code,
        model_and_seq=model_and_seq,
    )


def to_decode_error(refused: BodyError) -> ApiError | RequestValidationError:
    """The error received from another process."""
    if refused.faults is not None:
        return RequestValidationError(refused.faults)
    return ApiError(
        refused.error, status=refused.status, category=refused.category, code=refused.code
    )


_NOT_AN_OBJECT = {
    "type": "model_attributes_type",
    "loc": ("body",),
    "msg": "Input should be a valid dictionary or object to extract fields from",
}


def _find_model_and_seq(parsed: Any) -> dict[str, Any] | None:
    """The model and sequence number; a sampler's sequence number is not one of a model."""
    if not isinstance(parsed, dict) or "sampling_session_id" in parsed:
        return None
    model, seq = parsed.get("model_id", "default"), parsed.get("seq_id")
    if not isinstance(model, str) or not isinstance(seq, int) or not 0 < seq < 2**31:
        return None
    return {"model_id": model[:200], "seq_id": seq}


def _validated(kind: type[B], parsed: Any) -> B:
    # Each unknown key becomes a validation error, which takes more memory than the key.
    for outer in [parsed, *parsed.values()] if isinstance(parsed, dict) else []:
        if isinstance(outer, dict):
            require_few_keys(outer)
            samples = outer.get("data")
            for sample in samples if isinstance(samples, list) else []:
                if isinstance(sample, dict):
                    require_few_keys(sample)
    try:
        return kind.model_validate(parsed)
    except ValidationError as error:
        # pydantic would put the value, of any size, into each error.
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        raise RequestValidationError(
            [{**fault, "loc": ("body", *fault["loc"])} for fault in faults[:MAX_VALIDATION_ERRORS]]
        ) from error


def _decode_sample(body: AsampleBody, chunks: ChunkDecoder) -> tuple[DecodedBody, requests.Sample]:
    sources = (body.sampling_session_id, body.model_path, body.base_model)
    if sum(source is not None for source in sources) != 1:
        raise ApiError("send sampling_session_id, model_path or base_model, one of them")
    tokens, images = chunks.from_json(body.prompt.chunks, "the prompt")
    if not len(tokens):
        raise ApiError("the prompt has no tokens")
    last = body.prompt_logprobs_last_n
    if last is not None and not (body.prompt_logprobs and last < len(tokens)):
        raise ApiError(
            f"prompt_logprobs_last_n is {last} for a prompt of {len(tokens)} tokens: it is less,"
            " and prompt_logprobs is true"
        )
    operation = requests.Sample(
        prompt=token_array(tokens, "the prompt"),
        images=chunks.each_image(images),
        sampling=parse_sampling_params(body.sampling_params),
        count=body.num_samples,
        sampler=body.sampling_session_id,
        path=None if body.model_path is None else read_path(body.model_path),
        prompt_logprobs=bool(body.prompt_logprobs),
        topk_prompt_logprobs=body.topk_prompt_logprobs,
        topk_sample_logprobs=body.topk_sample_logprobs,
    )
    retry_key = ""
    if body.sampling_session_id is not None and body.seq_id is not None:
        retry_key = f"draw {body.sampling_session_id} {body.seq_id}"
    decoded = DecodedBody(
        base_model=body.base_model,
        retry_key=retry_key,
        last_prompt_logprobs=last,
        count=body.num_samples,
    )
    return decoded, operation
