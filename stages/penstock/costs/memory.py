"""What a training step takes of one rank's memory at its highest, before it runs. No torch.

A step is followed from moment to moment: the end of the forward pass, the backward pass through
each layer, what leads out of it, and the optimizer. Each moment holds what is at rest, what is kept
for the backward pass, gradients that are there already, and buffers; the highest is the answer.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from penstock.config.schema.parallelism import INTERLEAVED, V_SHAPED
from penstock.costs.activations import FP32, Layer, select_layer
from penstock.costs.onednn_buffers import program_bytes
from penstock.costs.optimizer_states import state_bytes
from penstock.costs.param_sizes import ROOT, Tensor, held, layers_here
from penstock.costs.sharded_model import Cut
from penstock_kernels.logit_chunks import tokens_at_once


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, by what they are for."""

    weights: float = 0
    gradients: float = 0
    optimizer: float = 0
    activations: float = 0
    logits: float = 0
    buffers: float = 0
    """Weights that were gathered or cast, and gradients on their way."""
    programs: float = 0
    """Of the library that multiplies."""

    @property
    def total(self) -> float:
        """All of it."""
        return sum(getattr(self, one.name) for one in fields(self))

    def __add__(self, other: "Memory") -> "Memory":
        """Both."""
        names = [one.name for one in fields(self)]
        return Memory(**{name: getattr(self, name) + getattr(other, name) for name in names})


def peak(cut: Cut) -> Memory:
    """At its highest, on the rank of a pipeline that takes the most."""
    return max((_Rank(cut, rank).peak() for rank in _ends(cut)), key=lambda memory: memory.total)


def at_rest(cut: Cut) -> float:
    """Bytes of weights, gradients and what the optimizer remembers, on the rank with the most."""
    return max(_Rank(cut, rank).at_rest() for rank in _ends(cut))


def _ends(cut: Cut) -> set[int]:
    """The ranks of a pipeline that may take the most: the first keeps the most activations, the
    last has the head."""
    return {0, cut.degrees.pipeline - 1}


class _Rank:
    """One rank of a pipeline, and its step."""

    def __init__(self, cut: Cut, pipeline: int) -> None:
        self.cut, self.train = cut, cut.run.train
        self.pipeline = pipeline
        self.tensors = held(cut, pipeline)
        self.layers = layers_here(cut, pipeline)
        self.keeps = {number: select_layer(cut, number) for number in self.layers}
        self.units: Mapping[int, list[Tensor]] = {
            unit: [tensor for tensor in self.tensors if tensor.layer == unit]
            for unit in (*self.layers, ROOT)
        }
        self.host = cut.kind == "cuda" and self.train.enable_fsdp_offload

    def peak(self) -> Memory:
        """The highest moment."""
        return max(self._moments(), key=lambda memory: memory.total)

    def _moments(self) -> Iterator[Memory]:
        rest = self._rest() + Memory(programs=program_bytes(self.cut))
        flight = self._in_flight()
        yield rest + self._forward_ends(flight)
        done = 0.0
        for at in reversed(range(len(self.layers))):
            yield from (rest + moment for moment in self._backward(at, done, flight))
            if not self.train.fuse_optimizer_step:
                done += self._gradients(self.layers[at])
        yield rest + self._root_ends(done)
        yield rest + self._update()

    def _rest(self) -> Memory:
        if self.host:
            return Memory()
        weights = sum(tensor.at_rest for tensor in self.tensors)
        states = sum(state_bytes(self.train, tensor) for tensor in self.tensors if tensor.learns)
        if self.cut.kind == "cuda" and self.train.optimizer_offload == "cpu":
            states = 0
        return Memory(weights=weights, optimizer=states)

    def at_rest(self) -> float:
        """Between the backward pass and the update."""
        gradients = sum(self._gradients(unit) for unit in self.units)
        return self._rest().total + gradients

    # What is kept for the backward pass.

    def _kept(self, layer: Layer) -> float:
        train = self.train
        if not train.enable_gradient_checkpointing:
            return layer.whole
        if train.recompute_modules is None:
            return layer.entry
        left = layer.stream
        left += 0 if "self_attn" in train.recompute_modules else layer.attention
        left += 0 if "mlp" in train.recompute_modules else layer.network
        # What a part that is computed again is given.
        return left + layer.entry * len(train.recompute_modules)

    def _again(self, layer: Layer) -> float:
        """What is there once it is computed again."""
        return max(0.0, layer.whole - self._kept(layer))

    def _in_flight(self) -> float:
        """Micro-batches whose activations are kept at once."""
        size, train = self.cut.degrees.pipeline, self.train
        several = self.cut.micro_batches
        if size == 1:
            return 1
        schedule = train.pipeline_parallel_schedule
        if schedule == "GPipe":
            return several
        if schedule in INTERLEAVED:
            virtual = train.resolved_virtual_stages
            first = (virtual - 1) * size + 2 * (size - self.pipeline - 1) + 1
            return min(several, first / virtual)
        if schedule in V_SHAPED:
            return min(several, size)
        return min(several, size - self.pipeline)

    def _saved(self, upto: int, flight: float) -> float:
        """Activations of the layers before number `upto`, of all micro-batches under way."""
        kept = [self._kept(self.keeps[number]) for number in self.layers]
        here = sum(kept[:upto]) + (flight - 1) * sum(kept)
        if self.train.enable_activation_offload and self.cut.kind == "cuda":
            limit = max(self.train.activation_gpu_limit * 1e9, 2 * max(kept, default=0))
            return min(here, limit)
        return here

    # Weights that are gathered or cast, and gradients.

    def _gathered(self, unit: int) -> float:
        """Bytes of a unit's weights as they are computed with, beside those at rest."""
        cut = self.cut
        tensors = self.units[unit]
        if cut.is_sharded:
            return sum(tensor.gathered for tensor in tensors)
        if cut.computes == cut.keeps:
            return 0
        # Autocast makes copies of matrices that learn; frozen ones are kept as they are needed.
        return sum(
            tensor.numbers * cut.computes
            for tensor in tensors
            if tensor.columns > 1 and tensor.width > cut.computes
        )

    def _sent(self, unit: int) -> float:
        """Bytes of a unit's gradients in the precision that they are added up in, all of them."""
        width = 2 if self.train.fsdp_reduce_dtype == "bf16" else FP32
        return sum(tensor.numbers * width for tensor in self.units[unit] if tensor.learns)

    def _fresh(self, unit: int) -> float:
        """Bytes of a unit's gradients as the backward pass makes them."""
        width = self.cut.computes if self.cut.is_sharded else self.cut.adds_up
        return sum(tensor.numbers * width for tensor in self.units[unit] if tensor.learns)

    def _gradients(self, unit: int) -> float:
        """Bytes of a unit's gradients once they are added up: this rank's share."""
        if self.host:
            return 0
        return sum(tensor.mine * self.cut.adds_up for tensor in self.units[unit] if tensor.learns)

    def _accumulated(self) -> float:
        """Gradients of earlier micro-batches, which under fsdp2 are whole until the last."""
        if self.cut.micro_batches == 1:
            return 0
        if self.cut.is_sharded:
            return sum(self._sent(unit) for unit in self.units)
        return sum(self._gradients(unit) for unit in self.units)

    def _whole(self, at: int) -> float:
        """Gathered weights while the layer in this place is computed: its own, those that are kept
        or on their way, and the root's."""
        cut = self.cut
        units = [self._gathered(number) for number in self.layers]
        root = self._gathered(ROOT)
        if not cut.is_sharded:
            if self.train.enable_gradient_checkpointing:
                return root + units[at]
            # Of each micro-batch under way.
            return self._in_flight() * (root + sum(units))
        if cut.kept != "nothing":
            return root + sum(units[: at + 1] if cut.kept == "backward" else units)
        neighbour = units[at - 1] if at else 0
        if cut.shards == 1:
            # Nothing is on its way.
            return root + units[at]
        # On its way a unit is there as it was cast, and as it arrives.
        copies = 1 if cut.computes == cut.keeps else 2
        return root + units[at] + copies * neighbour

    def _copied(self, unit: int) -> float:
        """What the library that sends gradients between processors copies."""
        return self._sent(unit) if self.cut.kind == "cpu" else 0

    # The moments.

    def _forward_ends(self, flight: float) -> Memory:
        saved = self._saved(len(self.layers), flight)
        buffers = self._whole(len(self.layers) - 1) if self.layers else self._gathered(ROOT)
        logits, gradients = self._loss()
        return Memory(
            gradients=gradients + self._accumulated(),
            activations=saved,
            logits=logits,
            buffers=buffers,
        )

    def _loss(self) -> tuple[float, float]:
        """Bytes of logits and hidden states at the loss, and of the head's gradient."""
        cut, config = self.cut, self.cut.config
        if not self._ends:
            return 0.0, 0.0
        entries = config.vocab_size / cut.degrees.tensor
        width = FP32 if cut.run.model.lm_head_fp32 else cut.computes
        # PyTorch's own loss keeps logits, the same in fp32, their softmax and its gradient.
        rows, each = cut.tokens, 4 * FP32
        if self.train.ce_mode != "eager":
            each = width
            rows = min(rows, tokens_at_once(int(entries * width), cut.kind))
        hidden = 3 * cut.tokens * config.hidden_size * width
        head = 0.0
        if not cut.run.lora.enable_lora:
            head = entries * config.hidden_size * (cut.computes if cut.is_sharded else cut.adds_up)
        return rows * entries * each + hidden, head

    @property
    def _ends(self) -> bool:
        last = self.cut.config.num_hidden_layers - 1
        return last in self.layers or not self.layers

    def _backward(self, at: int, done: float, flight: float) -> Iterator[Memory]:
        """The backward pass through the layer in this place: its beginning, with all that it kept;
        its end, with all its gradients; and while these are summed over ranks."""
        unit = self.layers[at]
        layer = self.keeps[unit]
        _, head = self._loss()
        sharded = self.cut.is_sharded
        # They go into those of earlier micro-batches.
        before = (done if self.cut.micro_batches == 1 else self._accumulated()) + head
        fresh = self._fresh(unit)
        own = 0.0 if sharded or self.cut.micro_batches > 1 else fresh
        buffers = self._whole(at)
        if sharded and at + 1 < len(self.layers):
            # What the sum over ranks is made from is there until the next one begins.
            buffers += self._sent(self.layers[at + 1])
        left = self._saved(at, flight) + layer.entry
        yield Memory(
            gradients=before,
            activations=self._saved(at + 1, flight) + self._again(layer) + layer.gradients,
            buffers=buffers,
        )
        yield Memory(
            gradients=before + own, activations=left, buffers=buffers + (fresh if sharded else 0)
        )
        if sharded:
            sums = max(fresh, self._copied(unit) + self._gradients(unit))
            yield Memory(
                gradients=before,
                activations=left,
                buffers=self._gathered(ROOT) + self._sent(unit) + sums,
            )

    def _root_ends(self, done: float) -> Memory:
        """The last sums: of the embedding and the head."""
        mine = done + self._gradients(ROOT)
        if not self.cut.is_sharded:
            # Buckets become the gradients, and until all have arrived there are both.
            both = mine if self.cut.degrees.num_replicas * self.cut.degrees.context > 1 else 0
            return Memory(gradients=mine, buffers=both + self._gathered(ROOT))
        gradients = mine
        if self.cut.micro_batches > 1:
            gradients += self._accumulated() - sum(self._sent(u) for u in self.layers)
        return Memory(
            gradients=gradients,
            buffers=self._fresh(ROOT) + self._sent(ROOT) + self._copied(ROOT),
        )

    def _update(self) -> Memory:
        if self.train.fuse_optimizer_step:
            return Memory()
        gradients = sum(self._gradients(unit) for unit in self.units)
        kept = self._gathered(ROOT) if self.cut.is_sharded and self.cut.kept == "step" else 0
        return Memory(gradients=gradients, buffers=kept)
