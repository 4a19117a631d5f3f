"""Decode client samples (datums) to tokens, images and per-token loss inputs.

From protobuf, or from JSON with chunks or `input_ids`. Targets are already shifted. JSON may
have `labels` instead (as in Hugging Face: the label of position t is token t), which are shifted
here, once. The label -100 is ignored by the loss.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.server.api.errors import ApiError
from penstock.server.api.wire import tinker_pb2 as pb
from penstock.server.api.wire.chunks import ChunkDecoder, ModelInput, Tokens, flatten
from penstock.server.api.wire.tensors import (
    MAX_NUMBERS,
    Numbers,
    from_json,
    from_list,
    from_proto,
    per_target,
    per_token,
    shape_from_json,
    shape_from_proto,
    to_integers,
    token_array,
)
from penstock.server.protocol.losses import (
    FACTORS,
    MAX_TARGETS,
    OPTIONAL,
    REQUIRED,
    SEVERAL_TARGETS,
    TARGETS,
)
from penstock.server.protocol.types import Array, Datum, Loss

IGNORED = -100
"""The label of untrained tokens (ignore_index)."""

RATIO_MASK = "sequence_ratio_mask"
"""The SDK's input of `gspo`: the mask of tokens that the sequence importance ratio covers."""

LossInputArrays = dict[str, Numbers]


def datums_from_proto(
    data: Sequence[pb.Datum], loss: Loss, chunks: ChunkDecoder
) -> tuple[Datum, ...]:
    """Decode the SDK's protobuf samples. Raises ApiError naming the sample and the invalid
    input."""
    return tuple(
        _datum_from_proto(datum, loss, chunks, f"sample {index}")
        for index, datum in enumerate(data)
    )


def datums_from_json(
    data: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], loss: Loss, chunks: ChunkDecoder
) -> tuple[Datum, ...]:
    """Decode JSON samples of either form: `model_input` and `loss_fn_inputs` of each. Raises
    ApiError as above."""
    return tuple(
        _datum_from_json(written, inputs, loss, chunks, f"sample {index}")
        for index, (written, inputs) in enumerate(data)
    )


def count_values_in_proto(data: Sequence[pb.Datum], loss: Loss) -> int:
    """Number of values in the SDK's samples with sparse tensors densified, computed from shapes and
    lengths without decoding.

    Raises ApiError: 413 over MAX_NUMBERS, 400 for more than MAX_TARGETS targets per token, and for
    inputs that the loss does not take.
    """
    total = 0
    for index, datum in enumerate(data):
        what = f"sample {index}"
        _check_names(datum.loss_fn_inputs, loss, what)
        total += sum(len(chunk.encoded_text.tokens) // 4 for chunk in datum.model_input)
        shapes = {
            name: shape_from_proto(tensor, f"{name} of {what}")
            for name, tensor in datum.loss_fn_inputs.items()
        }
        total = _add_values(total, shapes, loss, what)
    return total


def count_values_in_json(
    data: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], loss: Loss
) -> int:
    """The same for JSON samples. Raises ApiError as above, except for unknown inputs."""
    total = 0
    for index, (written, inputs) in enumerate(data):
        what = f"sample {index}"
        shapes = {
            name: shape_from_json(tensor, f"{name} of {what}")
            for name, tensor in (*written.items(), *inputs.items())
            if name not in ("chunks", "type")
        }
        chunks = written.get("chunks")
        for chunk in chunks if isinstance(chunks, list) else ():
            tokens = chunk.get("tokens") if isinstance(chunk, Mapping) else None
            total += len(tokens) if isinstance(tokens, list) else 0
        total = _add_values(total, shapes, loss, what)
    return total


def _add_values(total: int, shapes: Mapping[str, tuple[int, ...]], loss: Loss, what: str) -> int:
    """Add the number of values of one more sample."""
    targets = shapes.get(TARGETS, ())
    if (
        loss in SEVERAL_TARGETS
        and len(targets) == 2
        and targets[0] > 1
        and targets[1] > MAX_TARGETS
    ):
        raise ApiError(f"{what} has {targets[1]} targets of each token; {MAX_TARGETS} may be")
    total += sum(math.prod(shape) for shape in shapes.values())
    if total > MAX_NUMBERS:
        raise ApiError(
            f"the samples have over {MAX_NUMBERS} numbers; send fewer at once", status=413
        )
    return total


def _datum_from_proto(datum: pb.Datum, loss: Loss, chunks: ChunkDecoder, what: str) -> Datum:
    _check_names(datum.loss_fn_inputs, loss, what)
    model_input = chunks.from_proto(datum.model_input, f"the model_input of {what}")
    given = {
        name: from_proto(tensor, f"{name} of {what}")
        for name, tensor in datum.loss_fn_inputs.items()
    }
    return _build_datum(model_input, given, loss, what)


def _datum_from_json(
    written: Mapping[str, Any],
    inputs: Mapping[str, Any],
    loss: Loss,
    chunks: ChunkDecoder,
    what: str,
) -> Datum:
    if "labels" in inputs:
        if len(inputs) > 1:
            others = ", ".join(sorted(name[:100] for name in inputs if name != "labels")[:5])
            raise ApiError(
                f"{what} has labels and {others}: of labels alone is it plain where they belong;"
                " send target_tokens beside them, one for each token"
            )
        _check_names((TARGETS,), loss, what)
        model_input, name = _read_model_input(written, chunks, what), f"labels of {what}"
        labels = to_integers(
            per_token(_read_numbers(inputs["labels"], name), len(model_input.tokens), name), name
        )
        # The last token has no target.
        return _build_datum(model_input, {TARGETS: np.append(labels[1:], IGNORED)}, loss, what)
    _check_names(inputs, loss, what)
    given = {name: _read_numbers(value, f"{name} of {what}") for name, value in inputs.items()}
    return _build_datum(_read_model_input(written, chunks, what), given, loss, what)


def _read_model_input(written: Mapping[str, Any], chunks: ChunkDecoder, what: str) -> ModelInput:
    if "chunks" in written:
        if set(written) - {"chunks", "type"}:
            raise ApiError(f"the model_input of {what} has chunks and other things; send chunks")
        return chunks.from_json(written["chunks"], f"the model_input of {what}")
    if "input_ids" not in written:
        raise ApiError(f"the model_input of {what} has neither input_ids nor chunks")
    name = f"input_ids of {what}"
    tokens = flatten(to_integers(_read_numbers(written["input_ids"], name), name), name)
    _check_model_inputs(written, len(tokens), what)
    return ModelInput(tokens, ())


def _read_numbers(value: Any, what: str) -> Numbers:
    if isinstance(value, list):
        return from_list(value, what)
    if isinstance(value, Mapping):
        return from_json(value, what)
    raise ApiError(f"{what} is no tensor and no list of numbers")


def _check_model_inputs(written: Mapping[str, Any], length: int, what: str) -> None:
    """Optional model inputs are accepted if they have no effect."""
    plain = {"attention_mask": np.ones(length), "position_ids": np.arange(length)}
    for name in written.keys() - {"input_ids"}:
        if name not in plain:
            raise ApiError(f"the model_input of {what} has {name[:100]}, which is not read here")
        numbers = _read_numbers(written[name], f"{name} of {what}")
        if not np.array_equal(per_token(numbers, length, f"{name} of {what}"), plain[name]):
            raise ApiError(
                f"{name} of {what} is not that of one text without padding; send each text as a"
                " sample of its own"
            )


def _check_names(given: Collection[str], loss: Loss, what: str) -> None:
    """Checked before decoding, so that unsupported inputs cost nothing."""
    required = (TARGETS, *REQUIRED[loss])
    missing = [name for name in required if name not in given]
    if missing:
        raise ApiError(f"{what} has no {', '.join(missing)}, which {loss} takes")
    known = {*required, *OPTIONAL[loss], *((RATIO_MASK,) if loss == "gspo" else ())}
    strange = sorted(name for name in given if name not in known)
    if strange:
        raise ApiError(
            f"{what} has {', '.join(name[:100] for name in strange[:5])}, which {loss} does not"
            f" take; it takes {', '.join(sorted(known))}"
        )


def _build_datum(model_input: ModelInput, given: LossInputArrays, loss: Loss, what: str) -> Datum:
    tokens = model_input.tokens
    if not len(tokens):
        raise ApiError(f"{what} has no tokens")
    targets = _read_targets(given[TARGETS], len(tokens), loss, f"{TARGETS} of {what}")
    others = {
        name: per_target(numbers, targets.shape, f"{name} of {what}")
        for name, numbers in given.items()
        if name != TARGETS
    }
    if np.any(is_ignored := targets == IGNORED):
        others["weights"] = np.where(is_ignored, 0, others.get("weights", 1))
        targets = np.where(is_ignored, 0, targets)
    if RATIO_MASK in others:
        _apply_ratio_mask(others, what)
    inputs = {name: Array.of(numbers, "float32") for name, numbers in others.items()}
    inputs[TARGETS] = token_array(targets, f"{TARGETS} of {what}", "int64")
    tokens_T = token_array(tokens, f"model_input of {what}")
    return Datum(tokens=tokens_T, inputs=inputs, images=model_input.images)


def _apply_ratio_mask(others: LossInputArrays, what: str) -> None:
    """Set the mask to the tokens of the sequence importance ratio.

    Raises ApiError if other tokens have a nonzero advantage, or if tokens of the ratio have zero
    weight or mask.
    """
    is_of_ratio = others.pop(RATIO_MASK) != 0
    if any(np.any(others[name][is_of_ratio] == 0) for name in FACTORS if name in others):
        raise ApiError(
            f"{what} has no target, or weights or mask of 0, where its {RATIO_MASK} is 1"
        )
    if np.any(others["advantages"][~is_of_ratio] != 0):
        raise ApiError(f"{what} has advantages where its {RATIO_MASK} is 0; send 0 there")
    others["mask"] = is_of_ratio * others.get("mask", 1)


def _read_targets(numbers: Numbers, length: int, loss: Loss, what: str) -> Tokens:
    """int64 [T], or [T, K] for a loss with several targets per token."""
    several = loss in SEVERAL_TARGETS and numbers.ndim == 2 and len(numbers) == length
    return to_integers(
        numbers if several and numbers.size else per_token(numbers, length, what), what
    )
