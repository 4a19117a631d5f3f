"""Request validation before queueing.

Uses only the request and the workers' limits; whether the model exists is checked elsewhere.
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.server.protocol.losses import (
    FACTORS,
    MAX_TARGETS,
    OPTIONAL,
    PARAMS,
    REQUIRED,
    SEVERAL_TARGETS,
    TARGETS,
)
from penstock.server.protocol.requests import (
    CreateModel,
    LoadState,
    Ordered,
    Pass,
    Sample,
    SaveSampler,
    SaveState,
    Step,
    SyncWeights,
)
from penstock.server.protocol.results import Served
from penstock.server.protocol.types import Adam, Array, Datum, Loss, Sampling
from penstock.server.scheduler.checkpoint_names import (
    INITIAL,
    checkpoint_name,
    parse_checkpoint_path,
)
from penstock.server.scheduler.errors import RequestError
from penstock.server.scheduler.sessions import check_metadata

Numbers = npt.NDArray[Any]

MAX_SEQUENCES = 1024
"""Maximum sequences per sampling request."""

MAX_TOPK = 1024
MAX_TOLD = 1 << 22
"""Maximum number of top-k logprobs over all positions of a request: 32 MiB. Several requests are
answered in one frame."""


def check(work: Ordered | Sample, served: Served) -> None:
    """Raises RequestError for a request that is invalid for every model."""
    match work:
        case Pass():
            _pass(work, served)
        case Step():
            _adam(work.adam)
        case Sample():
            _sample(work, served)
        case CreateModel():
            _create(work, served)
        case SaveState() | SaveSampler():
            if work.name is not None:
                checkpoint_name(work.name)
            if isinstance(work, SaveState) and work.name == INITIAL:
                raise _wrong(f"{INITIAL} is what a model begins with; choose another name")
            check_ttl(work.ttl_seconds)
            check_metadata((), work.user_metadata)
        case LoadState():
            parse_checkpoint_path(work.path)
        case SyncWeights():
            if work.buffer_size_mb < 1:
                raise _wrong(f"buffer_size_mb is {work.buffer_size_mb}; it is 1 at least")
            if not 0 <= work.master_port <= 65535:
                raise _wrong(f"master_port is {work.master_port}, which is no port")
        case _:
            pass


def _pass(work: Pass, served: Served) -> None:
    if not work.data:
        raise _wrong("the pass has no samples")
    known = PARAMS[work.loss]
    for name, value in work.params.items():
        if name not in known:
            raise _wrong(
                f"{work.loss} takes no {name[:100]}; it takes {', '.join(known) or 'no numbers'}"
            )
        if not math.isfinite(value):
            raise _wrong(f"{name} of {work.loss} is {value}, which is not finite")
    for index, datum in enumerate(work.data):
        _datum(datum, work.loss, served, f"sample {index}")


def _datum(datum: Datum, loss: Loss, served: Served, what: str) -> None:
    tokens = _tokens(datum.tokens, served, f"tokens of {what}")
    required = (TARGETS, *REQUIRED[loss])
    missing = [name for name in required if name not in datum.inputs]
    if missing:
        raise _wrong(f"{what} has no {', '.join(missing)}, which {loss} takes")
    known = {*required, *OPTIONAL[loss]}
    shape = datum.inputs[TARGETS].shape
    if len(shape) != 2 or loss not in SEVERAL_TARGETS or not shape[1]:
        shape = tokens.shape
    if len(shape) == 2 and shape[1] > MAX_TARGETS:
        raise _wrong(f"{what} has {shape[1]} targets of each token; {MAX_TARGETS} may be")
    given: dict[str, Numbers] = {}
    for name, array in datum.inputs.items():
        if name not in known:
            raise _wrong(
                f"{what} has {name[:100]}, which {loss} does not take;"
                f" it takes {', '.join(sorted(known))}"
            )
        numbers = _numbers(array, f"{name} of {what}")
        if numbers.shape != shape or len(numbers) != len(tokens):
            each = "each token" if len(shape) == 1 else "each target of each token"
            raise _wrong(
                f"{name} of {what} has shape {list(numbers.shape)}, and its tokens {len(tokens)}:"
                f" it has one number for {each}"
            )
        given[name] = numbers
    _within(given.pop(TARGETS), served, f"{TARGETS} of {what}")
    _finite(given, what)


def _finite(given: dict[str, Numbers], what: str) -> None:
    """Values of masked tokens (factor 0) need not be finite."""
    factors = [given[name] for name in FACTORS if name in given]
    for name, numbers in given.items():
        finite = np.isfinite(numbers.astype(np.float64, copy=False))
        if name not in FACTORS:
            for factor in factors:
                finite |= factor == 0
        if not finite.all():
            at = int(np.argmin(finite))
            raise _wrong(f"{name} of {what} is {numbers.flat[at]} at {at}, which is not finite")


def _sample(work: Sample, served: Served) -> None:
    if not served.samples:
        raise _wrong("nothing can be sampled here: the workers' layout does not allow for it")
    tokens = _tokens(work.prompt, served, "the prompt")
    if len(tokens) > served.max_context:
        raise _wrong(
            f"the prompt has {len(tokens)} tokens, and the model's context {served.max_context}"
        )
    if not 1 <= work.count <= MAX_SEQUENCES:
        raise _wrong(f"{work.count} sequences are asked for; 1 to {MAX_SEQUENCES} may be")
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if not 0 <= (count := getattr(work, name)) <= MAX_TOPK:
            raise _wrong(f"{name} is {count}; 0 to {MAX_TOPK} may be")
    room = served.max_context - len(tokens)
    drawn = room if work.sampling.max_tokens is None else min(room, work.sampling.max_tokens)
    told = len(tokens) * work.topk_prompt_logprobs + work.count * drawn * work.topk_sample_logprobs
    if told > MAX_TOLD:
        raise _wrong(
            f"{told} likeliest tokens are asked for, and {MAX_TOLD} may be: those of a prompt of "
            f"{len(tokens)} tokens and of {work.count} answers of up to {drawn}.\n"
            "  Ask for fewer in each place, or give max_tokens."
        )
    if work.sampler is not None and work.path is not None:
        raise _wrong("both a sampler and a path are said to sample from; say one")
    if work.path is not None:
        parse_checkpoint_path(work.path)
    _sampling(work.sampling, served)


def _sampling(sampling: Sampling, served: Served) -> None:
    if sampling.max_tokens is not None and sampling.max_tokens < 0:
        raise _wrong(f"max_tokens is {sampling.max_tokens}; it is 0 at least")
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise _wrong(f"temperature is {sampling.temperature}; it is 0 or above")
    if sampling.top_k != -1 and sampling.top_k < 1:
        raise _wrong(f"top_k is {sampling.top_k}; it is 1 at least, or -1 for all")
    if not 0 < sampling.top_p <= 1:
        raise _wrong(f"top_p is {sampling.top_p}; it is above 0 and at most 1")
    if sampling.stop_tokens:
        _within(np.array(sampling.stop_tokens, np.int64), served, "stop_tokens")
    if "" in sampling.stop_texts:
        raise _wrong("an empty text is among those to stop at")


def _create(work: CreateModel, served: Served) -> None:
    if work.path is not None:
        parse_checkpoint_path(work.path)
    if served.trains == "all weights":
        if work.lora is not None:
            raise _wrong(
                f"an adapter of rank {work.lora.rank} is asked for, and all weights are trained"
                " here.\n  Ask for none, or set enable_lora in the server's file."
            )
        return
    if work.lora is None:
        return
    if not 1 <= work.lora.rank <= served.max_rank:
        raise _wrong(
            f"the rank asked for is {work.lora.rank}; 1 to {served.max_rank} may be.\n"
            "  Ask for less, or raise lora_rank in the server's file."
        )
    if work.lora.alpha is not None and not (math.isfinite(work.lora.alpha) and work.lora.alpha > 0):
        raise _wrong(f"alpha is {work.lora.alpha}; it is above 0")


def _adam(adam: Adam) -> None:
    for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
        value = getattr(adam, name)
        if not (math.isfinite(value) and value >= 0):
            raise _wrong(f"{name} is {value}; it is finite, and 0 or above")
    for name in ("beta1", "beta2"):
        value = getattr(adam, name)
        if not 0 <= value < 1:
            raise _wrong(f"{name} is {value}; it is 0 or above, and below 1")


def _tokens(array: Array, served: Served, what: str) -> Numbers:
    numbers = _numbers(array, what)
    if numbers.ndim != 1 or not len(numbers):
        raise _wrong(f"{what}: their shape is {list(numbers.shape)}; it is [T], and T at least 1")
    _within(numbers, served, what)
    return numbers


def _within(numbers: Numbers, served: Served, what: str) -> None:
    if not np.issubdtype(numbers.dtype, np.integer):
        raise _wrong(f"{what}: they are {numbers.dtype}, and tokens are whole numbers")
    top = served.vocab_size
    outside = (numbers < 0) if top is None else (numbers < 0) | (numbers >= top)
    if outside.any():
        at = int(np.argmax(outside))
        limit = "" if top is None else f", and below {top}"
        raise _wrong(
            f"{what}: {numbers.flat[at]} at {at} is no token; tokens are 0 or above{limit}"
        )


def _numbers(array: Array, what: str) -> Numbers:
    try:
        numbers = array.numpy()
    except ValueError as error:
        raise _wrong(f"{what}: the numbers do not fill their shape: {error}") from None
    if numbers.shape != array.shape:
        raise _wrong(f"{what}: {list(array.shape)} is no shape")
    return numbers


def check_base(name: str | None, names: Iterable[str]) -> None:
    """Raises RequestError if the base model has another name."""
    known = list(names)
    if name is not None and name not in known:
        raise _wrong(f"the base model is {known[0]} here; {name[:200]!r} is not served")


def check_ttl(ttl_seconds: float | None) -> None:
    """Raises RequestError for an unsupported time to live."""
    if ttl_seconds is not None and not (math.isfinite(ttl_seconds) and ttl_seconds > 0):
        raise _wrong(f"ttl_seconds is {ttl_seconds}; it is finite and above 0")


def _wrong(error: str) -> RequestError:
    return RequestError("invalid", error)
