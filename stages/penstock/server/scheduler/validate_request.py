"""Request validation before queueing. Uses only the request and the workers' limits; whether the
model exists is checked elsewhere."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.server.protocol import requests
from penstock.server.protocol.images import Image
from penstock.server.protocol.losses import (
    FACTORS,
    MAX_TARGETS,
    SEVERAL_TARGETS,
    TARGETS,
    inputs_fault,
    params_fault,
)
from penstock.server.protocol.requests import CreateModel, ForwardBackward, Sample
from penstock.server.protocol.results import ServedModel
from penstock.server.protocol.types import AdamParams, Array, Datum, Loss, SamplingParams
from penstock.server.scheduler.checkpoint_names import (
    INITIAL,
    checkpoint_name,
    parse_checkpoint_path,
)
from penstock.server.scheduler.errors import RequestError
from penstock.server.scheduler.sessions import check_metadata

Numbers = npt.NDArray[Any]

MAX_SEQUENCES = 1024
MAX_TOPK = 1024
# Maximum number of top-k logprobs over all positions of a request: 32 MiB. Several requests are
# answered in one frame.
MAX_TOPK_VALUES = 1 << 22


def check(operation: requests.ModelOperation | Sample, served: ServedModel) -> None:
    """Raises RequestError for a request that is invalid for every model."""
    match operation:
        case ForwardBackward():
            _check_pass(operation, served)
        case requests.OptimStep():
            _check_adam(operation.adam)
        case Sample():
            _check_sample(operation, served)
        case CreateModel():
            _check_create(operation, served)
        case requests.SaveState() | requests.SaveSamplerWeights():
            if operation.name is not None:
                checkpoint_name(operation.name)
            if isinstance(operation, requests.SaveState) and operation.name == INITIAL:
                raise _invalid(
                    f"{INITIAL} is the initial checkpoint of every model; choose another name"
                )
            check_ttl(operation.ttl_seconds)
            check_metadata((), operation.user_metadata)
        case requests.LoadState():
            parse_checkpoint_path(operation.path)
        case requests.SyncWeights():
            if operation.buffer_size_mb < 1:
                raise _invalid(f"buffer_size_mb is {operation.buffer_size_mb}; it is 1 at least")
            if not 0 <= operation.master_port <= 65535:
                raise _invalid(f"master_port is {operation.master_port}, which is no port")
        case _:
            pass


def _check_pass(operation: ForwardBackward, served: ServedModel) -> None:
    if not operation.data:
        raise _invalid("the pass has no samples")
    if fault := params_fault(operation.loss, operation.params):
        raise _invalid(fault)
    for name, value in operation.params.items():
        if not math.isfinite(value):
            raise _invalid(f"{name} of {operation.loss} is {value}, which is not finite")
    for index, datum in enumerate(operation.data):
        loc = f"sample {index}"
        if not all(0 <= number < len(operation.images) for number in datum.images):
            raise _invalid(f"{loc} has images that are not among those of the pass")
        images = [operation.images[number] for number in datum.images]
        _check_datum(datum, images, operation.loss, served, loc)


def _check_datum(
    datum: Datum, images: Sequence[Image], loss: Loss, served: ServedModel, loc: str
) -> None:
    tokens = _check_tokens(datum.tokens, served, f"tokens of {loc}")
    _check_images(tokens, images, served, loc)
    if fault := inputs_fault(loss, datum.inputs):
        raise _invalid(f"{loc} {fault}")
    shape = datum.inputs[TARGETS].shape
    if len(shape) != 2 or loss not in SEVERAL_TARGETS or not shape[1]:
        shape = tokens.shape
    if len(shape) == 2 and shape[1] > MAX_TARGETS:
        raise _invalid(f"{loc} has {shape[1]} targets of each token; {MAX_TARGETS} may be")
    arrays: dict[str, Numbers] = {}
    for name, array in datum.inputs.items():
        numbers = _read_array(array, f"{name} of {loc}")
        if numbers.shape != shape or len(numbers) != len(tokens):
            unit = "each token" if len(shape) == 1 else "each target of each token"
            raise _invalid(
                f"{name} of {loc} has shape {list(numbers.shape)}, and its tokens {len(tokens)}:"
                f" it has one number for {unit}"
            )
        arrays[name] = numbers
    _check_token_range(arrays.pop(TARGETS), served, f"{TARGETS} of {loc}")
    _check_finite(arrays, loc)


def _check_images(tokens: Numbers, images: Sequence[Image], served: ServedModel, loc: str) -> None:
    """Raises RequestError unless there is an image token for each feature of the images."""
    if served.image_token_id is None:
        if images:
            raise _invalid(f"{loc} has images, and a {served.arch} takes text alone here")
        return
    count = int(np.count_nonzero(tokens == served.image_token_id))
    if count != (features := sum(image.num_tokens for image in images)):
        raise _invalid(
            f"{loc} has {count} image tokens ({served.image_token_id}) for {features} features of"
            f" {len(images)} images: send images as chunks of their own, and no image token as text"
        )


def _check_finite(arrays: dict[str, Numbers], loc: str) -> None:
    # Values of masked tokens (factor 0) need not be finite.
    factors = [arrays[name] for name in FACTORS if name in arrays]
    for name, numbers in arrays.items():
        finite = np.isfinite(numbers.astype(np.float64, copy=False))
        if name not in FACTORS:
            for factor in factors:
                finite |= factor == 0
        if not finite.all():
            index = int(np.argmin(finite))
            raise _invalid(
                f"{name} of {loc} is {numbers.flat[index]} at {index}, which is not finite"
            )


def _check_sample(operation: Sample, served: ServedModel) -> None:
    if not served.samples:
        raise _invalid("nothing can be sampled here: the workers' layout does not allow for it")
    tokens = _check_tokens(operation.prompt, served, "the prompt")
    _check_images(tokens, operation.images, served, "the prompt")
    if len(tokens) > served.max_context:
        raise _invalid(
            f"the prompt has {len(tokens)} tokens, and the model's context {served.max_context}"
        )
    if not 1 <= operation.count <= MAX_SEQUENCES:
        raise _invalid(f"{operation.count} sequences are requested; 1 to {MAX_SEQUENCES} may be")
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if not 0 <= (count := getattr(operation, name)) <= MAX_TOPK:
            raise _invalid(f"{name} is {count}; 0 to {MAX_TOPK} may be")
    free_tokens = served.max_context - len(tokens)
    limit = operation.sampling.max_tokens
    max_new_tokens = free_tokens if limit is None else min(free_tokens, limit)
    num_topk_values = (
        len(tokens) * operation.topk_prompt_logprobs
        + operation.count * max_new_tokens * operation.topk_sample_logprobs
    )
    if num_topk_values > MAX_TOPK_VALUES:
        raise _invalid(
            f"{num_topk_values} top-k logprobs are requested, for a prompt of {len(tokens)} tokens"
            f" and {operation.count} completions of up to {max_new_tokens} tokens; at most"
            f" {MAX_TOPK_VALUES} are allowed.\n  Request fewer per token, or set max_tokens."
        )
    if operation.sampler is not None and operation.path is not None:
        raise _invalid("both a sampler and a path are said to sample from; say one")
    if operation.path is not None:
        parse_checkpoint_path(operation.path)
    _check_sampling_params(operation.sampling, served)


def _check_sampling_params(sampling: SamplingParams, served: ServedModel) -> None:
    if sampling.max_tokens is not None and sampling.max_tokens < 0:
        raise _invalid(f"max_tokens is {sampling.max_tokens}; it is 0 at least")
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise _invalid(f"temperature is {sampling.temperature}; it is 0 or above")
    if sampling.top_k != -1 and sampling.top_k < 1:
        raise _invalid(f"top_k is {sampling.top_k}; it is 1 at least, or -1 for all")
    if not 0 < sampling.top_p <= 1:
        raise _invalid(f"top_p is {sampling.top_p}; it is above 0 and at most 1")
    if sampling.stop_tokens:
        _check_token_range(np.array(sampling.stop_tokens, np.int64), served, "stop_tokens")
    if "" in sampling.stop_texts:
        raise _invalid("an empty text is among those to stop at")


def _check_create(operation: CreateModel, served: ServedModel) -> None:
    if operation.path is not None:
        parse_checkpoint_path(operation.path)
    if served.trains == "all weights":
        if operation.lora is not None:
            raise _invalid(
                f"an adapter of rank {operation.lora.rank} is requested, and all weights are"
                " trained here.\n  Request none, or set enable_lora in the server's file."
            )
        return
    if operation.lora is None:
        return
    if not 1 <= operation.lora.rank <= served.max_rank:
        raise _invalid(
            f"the requested rank is {operation.lora.rank}; 1 to {served.max_rank} may be.\n"
            "  Request less, or raise lora_rank in the server's file."
        )
    alpha = operation.lora.alpha
    if alpha is not None and not (math.isfinite(alpha) and alpha > 0):
        raise _invalid(f"alpha is {alpha}; it is above 0")


def _check_adam(adam: AdamParams) -> None:
    for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
        value = getattr(adam, name)
        if not (math.isfinite(value) and value >= 0):
            raise _invalid(f"{name} is {value}; it is finite, and 0 or above")
    for name in ("beta1", "beta2"):
        value = getattr(adam, name)
        if not 0 <= value < 1:
            raise _invalid(f"{name} is {value}; it is 0 or above, and below 1")


def _check_tokens(array: Array, served: ServedModel, loc: str) -> Numbers:
    numbers = _read_array(array, loc)
    if numbers.ndim != 1 or not len(numbers):
        raise _invalid(f"{loc}: their shape is {list(numbers.shape)}; it is [T], and T at least 1")
    _check_token_range(numbers, served, loc)
    return numbers


def _check_token_range(numbers: Numbers, served: ServedModel, loc: str) -> None:
    if not np.issubdtype(numbers.dtype, np.integer):
        raise _invalid(f"{loc}: they are {numbers.dtype}, and tokens are whole numbers")
    top = served.vocab_size
    outside = (numbers < 0) if top is None else (numbers < 0) | (numbers >= top)
    if outside.any():
        index = int(np.argmax(outside))
        limit = "" if top is None else f", and below {top}"
        raise _invalid(
            f"{loc}: {numbers.flat[index]} at {index} is no token; tokens are 0 or above{limit}"
        )


def _read_array(array: Array, loc: str) -> Numbers:
    try:
        numbers = array.numpy()
    except ValueError as error:
        raise _invalid(f"{loc}: the numbers do not fill their shape: {error}") from None
    # reshape takes -1 for whatever length is left, and a shape from a client may have it.
    if numbers.shape != array.shape:
        raise _invalid(f"{loc}: {list(array.shape)} is no shape")
    return numbers


def check_base(name: str | None, names: Iterable[str]) -> None:
    """Raises RequestError if the base model has another name."""
    served = list(names)
    if name is not None and name not in served:
        raise _invalid(f"the base model is {served[0]} here; {name[:200]!r} is not served")


def check_ttl(ttl_seconds: float | None) -> None:
    """Raises RequestError for an unsupported time to live."""
    if ttl_seconds is not None and not (math.isfinite(ttl_seconds) and ttl_seconds > 0):
        raise _invalid(f"ttl_seconds is {ttl_seconds}; it is finite and above 0")


def _invalid(error: str) -> RequestError:
    return RequestError("invalid", error)
