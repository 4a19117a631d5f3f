"""Samples as clients send them, to tokens and what the loss takes of each of them.

In protobuf, and in JSON: of chunks of tokens, or of `input_ids`. Targets are shifted already; in
JSON there may be `labels` in their place (Hugging Face's: the label of position t is the token at
t), which are shifted here, once.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.server.api import tinker_pb2 as pb
from penstock.server.api.refusals import Refusal
from penstock.server.api.tensors import (
    Numbers,
    for_tokens,
    from_json,
    from_list,
    from_proto,
    token_array,
    tokens_of_bytes,
    whole,
)
from penstock.server.protocol.losses import FACTORS, OPTIONAL, REQUIRED, TARGETS
from penstock.server.protocol.values import Array, Datum, Loss

IGNORED = -100
"""The label of what is not trained on."""

Given = dict[str, Numbers]


def data_of_proto(data: Sequence[pb.Datum], loss: Loss) -> tuple[Datum, ...]:
    """The SDK's samples. Raises Refusal naming the sample and the input that is wrong."""
    return tuple(_of_proto(datum, loss, f"sample {index}") for index, datum in enumerate(data))


def data_of_json(
    data: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], loss: Loss
) -> tuple[Datum, ...]:
    """Samples of either form in JSON: `model_input` and `loss_fn_inputs` of each."""
    return tuple(
        _of_json(written, inputs, loss, f"sample {index}")
        for index, (written, inputs) in enumerate(data)
    )


def tokens_of_chunks(chunks: Any, what: str) -> npt.NDArray[np.int64]:
    """The tokens of a prompt of the SDK's, in JSON. Raises Refusal for images and sounds."""
    parts: list[npt.NDArray[np.int64]] = []
    if not isinstance(chunks, list) or not all(isinstance(chunk, dict) for chunk in chunks):
        raise Refusal(f"the chunks of {what} are no list of chunks")
    for chunk in chunks:
        kind = chunk.get("type", "encoded_text")
        if kind != "encoded_text" or not isinstance(chunk.get("tokens"), list):
            raise _no_text(str(kind), what)
        parts.append(_flat(whole(from_list(chunk["tokens"], what), what), what))
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _of_proto(datum: pb.Datum, loss: Loss, what: str) -> Datum:
    parts: list[npt.NDArray[np.int64]] = []
    for chunk in datum.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise _no_text(str(chunk.WhichOneof("chunk")), what)
        parts.append(tokens_of_bytes(chunk.encoded_text.tokens, f"model_input of {what}"))
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    given = {
        name: from_proto(tensor, f"{name[:100]} of {what}")
        for name, tensor in datum.loss_fn_inputs.items()
    }
    return _datum(tokens, given, loss, what)


def _of_json(written: Mapping[str, Any], inputs: Mapping[str, Any], loss: Loss, what: str) -> Datum:
    given = {name: _numbers(value, f"{name[:100]} of {what}") for name, value in inputs.items()}
    if "chunks" in written:
        if set(written) - {"chunks", "type"}:
            raise Refusal(f"the model_input of {what} has chunks and other things; send chunks")
        tokens = tokens_of_chunks(written["chunks"], f"model_input of {what}")
        return _datum(tokens, _shifted(given, len(tokens), what), loss, what)
    parts = {name: _numbers(value, f"{name[:100]} of {what}") for name, value in written.items()}
    if "input_ids" not in parts:
        raise Refusal(f"the model_input of {what} has neither input_ids nor chunks")
    tokens = _flat(whole(parts.pop("input_ids"), f"input_ids of {what}"), f"input_ids of {what}")
    _is_plain(parts, len(tokens), what)
    return _datum(tokens, _shifted(given, len(tokens), what), loss, what)


def _numbers(value: Any, what: str) -> Numbers:
    if isinstance(value, list):
        return from_list(value, what)
    if isinstance(value, Mapping):
        return from_json(value, what)
    raise Refusal(f"{what} is no tensor and no list of numbers")


def _is_plain(parts: Mapping[str, Numbers], length: int, what: str) -> None:
    """What else a model may be given is taken where it changes nothing."""
    plain = {"attention_mask": np.ones(length), "position_ids": np.arange(length)}
    for name, numbers in parts.items():
        if name not in plain:
            raise Refusal(f"the model_input of {what} has {name[:100]}, which is not read here")
        if not np.array_equal(for_tokens(numbers, length, f"{name} of {what}"), plain[name]):
            raise Refusal(
                f"{name} of {what} is not that of one text without padding; send each text as a"
                " sample of its own"
            )


def _shifted(given: Given, length: int, what: str) -> Given:
    """Labels to targets: that of the last token is not there, and of those that are masked there
    is none to train on."""
    if "labels" in given:
        if len(given) > 1:
            others = ", ".join(sorted(name[:100] for name in given if name != "labels")[:5])
            raise Refusal(
                f"{what} has labels and {others}: of labels alone is it plain where they belong;"
                " send target_tokens beside them, one for each token"
            )
        name = f"labels of {what}"
        labels = whole(for_tokens(given["labels"], length, name), name)
        targets = np.append(labels[1:], IGNORED)
        return {TARGETS: targets.clip(0), "weights": (targets != IGNORED).astype(np.float32)}
    if TARGETS in given:
        name = f"{TARGETS} of {what}"
        targets = whole(for_tokens(given[TARGETS], length, name), name)
        if np.any(targets == IGNORED):
            weights = given.get("weights", np.ones(length, np.float32))
            weights = for_tokens(weights, length, f"weights of {what}")
            masked = np.where(targets == IGNORED, 0, weights).astype(np.float32)
            return given | {TARGETS: np.where(targets == IGNORED, 0, targets), "weights": masked}
    return given


def _datum(tokens: npt.NDArray[np.int64], given: Given, loss: Loss, what: str) -> Datum:
    if not len(tokens):
        raise Refusal(f"{what} has no tokens")
    required = (TARGETS, *REQUIRED[loss])
    missing = [name for name in required if name not in given]
    if missing:
        raise Refusal(f"{what} has no {', '.join(missing)}, which {loss} takes")
    # The SDK's own losses send weights and masks beside what they take: all losses take those.
    known = {*required, *OPTIONAL[loss], *FACTORS}
    strange = sorted(name for name in given if name not in known)
    if strange:
        raise Refusal(
            f"{what} has {', '.join(name[:100] for name in strange[:5])}, which {loss} does not"
            f" take; it takes {', '.join(sorted(known))}"
        )
    inputs: dict[str, Array] = {}
    for name, numbers in given.items():
        each = for_tokens(numbers, len(tokens), f"{name} of {what}")
        if name == TARGETS:
            targets = whole(each, f"{name} of {what}")
            inputs[name] = Array.of(token_array(targets, f"{name} of {what}").numpy(), "int64")
        else:
            inputs[name] = Array.of(each, "float32")
    return Datum(tokens=token_array(tokens, f"model_input of {what}"), inputs=inputs)


def _flat(numbers: npt.NDArray[np.int64], what: str) -> npt.NDArray[np.int64]:
    """[T], also of [1, T]."""
    return for_tokens(numbers, numbers.size, what) if numbers.size else numbers.reshape(0)


def _no_text(kind: str, what: str) -> Refusal:
    return Refusal(f"{what} has a chunk of {kind[:50]!r}: text alone is trained on here")
