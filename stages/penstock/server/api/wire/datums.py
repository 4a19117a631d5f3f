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
from penstock.server.api.wire.chunks import ChunkDecoder, ModelInput, flatten
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
    SEVERAL_TARGETS,
    TARGETS,
    inputs_fault,
)
from penstock.server.protocol.types import Array, Datum, Loss

IGNORED = -100  # The label of untrained tokens (ignore_index)
RATIO_MASK = "sequence_ratio_mask"
"""The SDK's input of `gspo`: the mask of tokens that the sequence importance ratio covers."""

LossInputArrays = dict[str, Numbers]


def datums_from_proto(
    data: Sequence[pb.Datum], loss: Loss, chunks: ChunkDecoder
) -> tuple[Datum, ...]:
    """Decode protobuf samples. Raises ApiError naming the sample and the invalid input."""
    decoded: list[Datum] = []
    for index, datum in enumerate(data):
        loc, inputs = f"sample {index}", datum.loss_fn_inputs
        _check_names(inputs, loss, loc)
        model_input = chunks.from_proto(datum.model_input, f"the model_input of {loc}")
        arrays = {name: from_proto(inputs[name], f"{name} of {loc}") for name in inputs}
        decoded.append(_build_datum(model_input, arrays, loss, loc))
    return tuple(decoded)


def datums_from_json(
    data: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], loss: Loss, chunks: ChunkDecoder
) -> tuple[Datum, ...]:
    """Decode JSON samples: `model_input` and `loss_fn_inputs` of each. Raises ApiError as above."""
    return tuple(
        _datum_from_json(written, inputs, loss, chunks, f"sample {index}")
        for index, (written, inputs) in enumerate(data)
    )


def count_values_in_proto(data: Sequence[pb.Datum], loss: Loss) -> int:
    """Number of values in the SDK's samples with sparse tensors densified, computed from shapes and
    lengths without decoding. Raises ApiError: 413 over MAX_NUMBERS, 400 for more than MAX_TARGETS
    targets per token, and for inputs that the loss does not take."""
    total = 0
    for index, datum in enumerate(data):
        loc, inputs = f"sample {index}", datum.loss_fn_inputs
        _check_names(inputs, loss, loc)
        # The SDK sends tokens as bytes of int32.
        total += sum(len(chunk.encoded_text.tokens) // 4 for chunk in datum.model_input)
        shapes = {name: shape_from_proto(inputs[name], f"{name} of {loc}") for name in inputs}
        total = _add_values(total, shapes, loss, loc)
    return total


def count_values_in_json(
    data: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], loss: Loss
) -> int:
    """The same for JSON samples. Raises ApiError as above, except for unknown inputs."""
    total = 0
    for index, (written, inputs) in enumerate(data):
        loc = f"sample {index}"
        shapes = {
            name: shape_from_json(tensor, f"{name} of {loc}")
            for name, tensor in (*written.items(), *inputs.items())
            if name not in ("chunks", "type")
        }
        chunks = written.get("chunks")
        for chunk in chunks if isinstance(chunks, list) else ():
            tokens = chunk.get("tokens") if isinstance(chunk, Mapping) else None
            total += len(tokens) if isinstance(tokens, list) else 0
        total = _add_values(total, shapes, loss, loc)
    return total


def _add_values(total: int, shapes: Mapping[str, tuple[int, ...]], loss: Loss, loc: str) -> int:
    targets = shapes.get(TARGETS, ())
    is_several = loss in SEVERAL_TARGETS and len(targets) == 2 and targets[0] > 1
    if is_several and targets[1] > MAX_TARGETS:
        raise ApiError(f"{loc} has {targets[1]} targets of each token; {MAX_TARGETS} may be")
    total += sum(math.prod(shape) for shape in shapes.values())
    if total > MAX_NUMBERS:
        raise ApiError(
            f"the samples have over {MAX_NUMBERS} numbers; send fewer at once", status=413
        )
    return total


def _datum_from_json(
    written: Mapping[str, Any],
    inputs: Mapping[str, Any],
    loss: Loss,
    chunks: ChunkDecoder,
    loc: str,
) -> Datum:
    if "labels" in inputs:
        if len(inputs) > 1:
            extra = ", ".join(sorted(name[:100] for name in inputs if name != "labels")[:5])
            raise ApiError(
                f"{loc} has labels and {extra}: of labels alone is it plain where they belong;"
                " send target_tokens beside them, one for each token"
            )
        _check_names((TARGETS,), loss, loc)
        model_input, name = _read_model_input(written, chunks, loc), f"labels of {loc}"
        labels = to_integers(
            per_token(_read_numbers(inputs["labels"], name), len(model_input.tokens), name), name
        )
        # The last token has no target.
        return _build_datum(model_input, {TARGETS: np.append(labels[1:], IGNORED)}, loss, loc)
    _check_names(inputs, loss, loc)
    arrays = {name: _read_numbers(value, f"{name} of {loc}") for name, value in inputs.items()}
    return _build_datum(_read_model_input(written, chunks, loc), arrays, loss, loc)


def _read_model_input(written: Mapping[str, Any], chunks: ChunkDecoder, loc: str) -> ModelInput:
    if "chunks" in written:
        if set(written) - {"chunks", "type"}:
            raise ApiError(f"the model_input of {loc} has chunks and other things; send chunks")
        return chunks.from_json(written["chunks"], f"the model_input of {loc}")
    if "input_ids" not in written:
        raise ApiError(f"the model_input of {loc} has neither input_ids nor chunks")
    name = f"input_ids of {loc}"
    tokens = flatten(to_integers(_read_numbers(written["input_ids"], name), name), name)
    _check_model_inputs(written, len(tokens), loc)
    return ModelInput(tokens, ())


def _read_numbers(value: Any, loc: str) -> Numbers:
    if isinstance(value, list):
        return from_list(value, loc)
    if isinstance(value, Mapping):
        return from_json(value, loc)
    raise ApiError(f"{loc} is no tensor and no list of numbers")


def _check_model_inputs(written: Mapping[str, Any], length: int, loc: str) -> None:
    """Optional model inputs are accepted if they have no effect."""
    plain = {"attention_mask": np.ones(length), "position_ids": np.arange(length)}
    for name in written.keys() - {"input_ids"}:
        if name not in plain:
            raise ApiError(f"the model_input of {loc} has {name[:100]}, which is not read here")
        numbers = _read_numbers(written[name], f"{name} of {loc}")
        if not np.array_equal(per_token(numbers, length, f"{name} of {loc}"), plain[name]):
            raise ApiError(
                f"{name} of {loc} is not that of one text without padding; send each text as a"
                " sample of its own"
            )


def _check_names(names: Collection[str], loss: Loss, loc: str) -> None:
    # Checked before decoding, so that unsupported inputs cost nothing.
    if fault := inputs_fault(loss, names, *((RATIO_MASK,) if loss == "gspo" else ())):
        raise ApiError(f"{loc} {fault}")


def _build_datum(model_input: ModelInput, arrays: LossInputArrays, loss: Loss, loc: str) -> Datum:
    tokens = model_input.tokens
    if not len(tokens):
        raise ApiError(f"{loc} has no tokens")
    numbers, name = arrays[TARGETS], f"{TARGETS} of {loc}"
    # [T, K] for a loss with several targets per token.
    several = loss in SEVERAL_TARGETS and numbers.ndim == 2 and len(numbers) == len(tokens)
    if not (several and numbers.size):
        numbers = per_token(numbers, len(tokens), name)
    targets = to_integers(numbers, name)
    factors = {
        name: per_target(numbers, targets.shape, f"{name} of {loc}")
        for name, numbers in arrays.items()
        if name != TARGETS
    }
    if np.any(is_ignored := targets == IGNORED):
        factors["weights"] = np.where(is_ignored, 0, factors.get("weights", 1))
        targets = np.where(is_ignored, 0, targets)
    if RATIO_MASK in factors:
        _apply_ratio_mask(factors, loc)
    inputs = {name: Array.of(numbers, "float32") for name, numbers in factors.items()}
    inputs[TARGETS] = token_array(targets, name, "int64")
    tokens_T = token_array(tokens, f"model_input of {loc}")
    return Datum(tokens=tokens_T, inputs=inputs, images=model_input.images)


def _apply_ratio_mask(factors: LossInputArrays, loc: str) -> None:
    """Set the mask to the tokens of the sequence importance ratio. Raises ApiError if other tokens
    have a nonzero advantage, or if tokens of the ratio have zero weight or mask."""
    is_of_ratio = factors.pop(RATIO_MASK) != 0
    if any(np.any(factors[name][is_of_ratio] == 0) for name in FACTORS if name in factors):
        raise ApiError(f"{loc} has no target, or weights or mask of 0, where its {RATIO_MASK} is 1")
    if np.any(factors["advantages"][~is_of_ratio] != 0):
        raise ApiError(f"{loc} has advantages where its {RATIO_MASK} is 0; send 0 there")
    factors["mask"] = is_of_ratio * factors.get("mask", 1)
