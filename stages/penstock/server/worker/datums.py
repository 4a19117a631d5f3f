"""Client samples as loss inputs, and the outputs returned for each. T tokens of a sample; K targets
of each, if there are several."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from penstock.engine.losses.client_loss import PolicyLoss
from penstock.losses.policy import LossInputs
from penstock.rows.reader import RowImage
from penstock.rows.schema import IGNORED
from penstock.server.protocol.images import Image
from penstock.server.protocol.losses import (
    CLIPS,
    FACTORS,
    PARAMS,
    SEVERAL_TARGETS,
    TARGETS,
    inputs_fault,
    params_fault,
)
from penstock.server.protocol.types import Array, Datum
from penstock.server.protocol.worker_commands import ForwardBackwardCommand
from penstock.server.worker.errors import CommandError

Numbers = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Sample:
    """A validated client sample."""

    tokens: npt.NDArray[np.int32]  # [T]
    targets: npt.NDArray[np.int32]  # [T] or [T, K]; IGNORED where there is none
    loss_inputs: Mapping[str, Numbers]  # Loss inputs by field name, in the shape of the targets
    images: tuple[RowImage, ...] = ()  # In the order of their tokens

    @property
    def num_targets(self) -> int:
        """Targets per token: K, or 1."""
        return self.targets.shape[1] if self.targets.ndim > 1 else 1

    @property
    def num_trained(self) -> int:
        """Number of tokens with at least one unmasked target."""
        counts = self.loss_inputs["factors_T"] != 0
        return int(np.count_nonzero(counts.any(axis=1) if counts.ndim > 1 else counts))


def build_client_loss(command: ForwardBackwardCommand) -> PolicyLoss:
    """The loss, with default parameters. Raises CommandError for invalid parameters."""
    if fault := params_fault(command.loss, command.params):
        raise CommandError("invalid", f"{fault}.\n  Leave it out.")
    params = {**PARAMS[command.loss], **command.params}
    low, high = (params.get(name, 0.0) for name in CLIPS)
    if low > high:
        raise CommandError(
            "invalid",
            f"{CLIPS[0]} is {low:g}, and {CLIPS[1]} {high:g}.\n  Give the lower of them first.",
        )
    bound = params.get("eps_clip_c", 0.0)
    if bound and bound <= 1:
        raise CommandError(
            "invalid", f"eps_clip_c is {bound:g}.\n  Give one above 1, or 0 for no bound."
        )
    return PolicyLoss(command.loss, params)


def build_samples(command: ForwardBackwardCommand, vocab_size: int) -> list[Sample]:
    """The samples of a pass. Raises CommandError for invalid samples."""
    loss = build_client_loss(command)
    images = [build_image(image) for image in command.images]
    return [
        _sample(number, datum, images, loss, vocab_size)
        for number, datum in enumerate(command.data)
    ]


def build_image(image: Image) -> RowImage:
    """An image of a message, whose tensors are views of it."""
    tensors = {name: tensor.stored() for name, tensor in image.tensors.items()}
    return RowImage(tensors, image.num_tokens, image.digest)


def _sample(
    number: int, datum: Datum, images: Sequence[RowImage], loss: PolicyLoss, vocab_size: int
) -> Sample:
    tokens = datum.tokens.numpy()
    count = len(tokens)
    inputs = dict(datum.inputs)
    if fault := inputs_fault(loss.name, inputs):
        raise _invalid_sample(number, fault)
    shape = _shape(number, inputs[TARGETS], count, loss)
    for name, array in inputs.items():
        if array.shape != shape:
            raise _invalid_sample(
                number, f"has {TARGETS} of shape {shape}, and {name} of shape {array.shape}"
            )
    targets = inputs.pop(TARGETS).numpy()
    for name, ids in (("tokens", tokens), (TARGETS, targets[targets != IGNORED])):
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            wrong = int(ids.min() if ids.min() < 0 else ids.max())
            raise _invalid_sample(
                number, f"has {wrong} in {name}, and the vocabulary is {vocab_size}"
            )
    # After the check: larger ids would wrap around, some of them into the vocabulary.
    targets = targets.astype(np.int32)
    numbers = {name: array.numpy().astype(np.float32) for name, array in inputs.items()}
    factors = np.ones(shape, np.float32)
    for name in FACTORS:
        factors = factors * numbers.get(name, np.float32(1))
    factors = np.where(targets == IGNORED, np.float32(0), factors)
    nothing = np.zeros(shape, np.float32)
    loss_inputs = {
        "factors_T": factors,
        "logprobs_T": numbers.get("logprobs", nothing),
        "advantages_T": numbers.get("advantages", nothing),
        "reference_T": numbers.get("ref_logprobs", numbers.get("logprobs", nothing)),
    }
    for field, name in zip(("low_T", "high_T"), CLIPS, strict=True):
        fixed = np.full(shape, loss.params.get(name, 0.0), np.float32)
        loss_inputs[field] = numbers.get(name, fixed)
    its_images = tuple(images[index] for index in datum.images)
    return Sample(tokens.astype(np.int32), targets, loss_inputs, its_images)


def _shape(number: int, targets: Array, count: int, loss: PolicyLoss) -> tuple[int, ...]:
    """The shape of all inputs, which is that of the targets."""
    if targets.shape == (count,):
        return targets.shape
    is_several = len(targets.shape) == 2 and targets.shape[0] == count and targets.shape[1] > 0
    if is_several and loss.name in SEVERAL_TARGETS:
        return targets.shape
    raise _invalid_sample(number, f"has {count} tokens, and {TARGETS} of shape {targets.shape}")


def _invalid_sample(number: int, reason: str) -> CommandError:
    return CommandError("invalid", f"sample {number} {reason}.\n  Send it as the loss takes it.")


def build_outputs(
    samples: Sequence[Sample], loss: PolicyLoss, logp: torch.Tensor
) -> tuple[list[dict[str, Numbers]], float]:
    """For each sample its token logprobs and, for per-token losses, its losses, in the shape of its
    targets; and the sum of all losses. `logp` are those of all tokens, concatenated over samples,
    [T of all] or, in a pass with several targets, [T of all, K]; fp32 on the CPU."""
    samples_outputs: list[dict[str, Numbers]] = []
    total = 0.0
    start = 0
    for sample in samples:
        sample_logp_T = logp[start : start + len(sample.tokens)]
        start += len(sample.tokens)
        if logp.dim() > 1:
            # Other samples of the pass may have more targets.
            sample_logp_T = sample_logp_T[:, : sample.num_targets]
        sample_logp_T = sample_logp_T.reshape(sample.targets.shape)
        loss_inputs = LossInputs(
            **{name: torch.from_numpy(numbers) for name, numbers in sample.loss_inputs.items()}
        )
        outputs: dict[str, Numbers] = {"logprobs": sample_logp_T.numpy()}
        losses_T = loss.of_tokens(sample_logp_T, loss_inputs)
        if losses_T is None:
            total += (
                loss.of_sample(sample_logp_T, loss_inputs).item() if len(sample_logp_T) else 0.0
            )
        else:
            outputs["elementwise_loss"] = losses_T.numpy()
            # In fp64: the larger the sum over the tokens of a pass, the more of each an fp32 one
            # drops.
            total += losses_T.double().sum().item()
        samples_outputs.append(outputs)
    return samples_outputs, total


def router_metrics(metrics: Mapping[str, object]) -> dict[str, float]:
    """Router metrics as one number per name."""
    routers = metrics.get("routers")
    means: dict[str, float] = {}
    if isinstance(routers, Mapping):
        layers = routers["layers"]
        for name in ("entropy", "imbalance", "most", "least"):
            for layer, value in zip(layers, routers[name], strict=True):
                means[f"routers/{layer}/{name}:mean"] = float(value)
    return means
