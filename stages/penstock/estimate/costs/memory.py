"""Estimated peak memory of one rank in a training step. No torch.

Memory is computed at several moments of a step: the end of the forward pass, the gradient reduction
of the head, the backward pass of each layer, the gradient reduction of the embedding, and the
optimizer step. Each moment is the sum of weights and optimizer states, saved activations, gradients
so far, and buffers; the peak is the maximum.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from penstock.config.schema.parallelism import INTERLEAVED, SPLIT_BACKWARD, V_SHAPED
from penstock.estimate.costs.activations import FP32, Layer, select_layer
from penstock.estimate.costs.onednn_buffers import program_bytes
from penstock.estimate.costs.optimizer_states import state_bytes
from penstock.estimate.costs.param_sizes import (
    EMBEDDING_UNIT,
    ROOT,
    Tensor,
    list_tensors,
    list_vision_tensors,
    local_layers,
)
from penstock.estimate.costs.sharded_model import ShardedModel
from penstock.estimate.costs.vision import SAVED_PER_LAYER
from penstock.models.automodel.outline import AutoModelConfig
from penstock_kernels.logit_chunks import tokens_at_once


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, by use."""

    weights: float = 0
    gradients: float = 0
    optimizer: float = 0
    activations: float = 0
    logits: float = 0
    buffers: float = 0
    """Gathered or cast weights, and gradients in communication buffers."""
    programs: float = 0
    """oneDNN's primitive cache."""

    @property
    def total(self) -> float:
        """Total bytes."""
        return sum(getattr(self, field.name) for field in fields(self))

    def __add__(self, other: "Memory") -> "Memory":
        """Add each kind of memory."""
        names = [field.name for field in fields(self)]
        return Memory(**{name: getattr(self, name) + getattr(other, name) for name in names})


def peak_memory(sharded: ShardedModel) -> Memory:
    """Peak memory, on the pipeline rank with the highest peak; that of a vision part is added to
    the first rank's."""
    peaks = {rank: _Rank(sharded, rank).peak() for rank in _ends(sharded)}
    peaks[0] += _vision_memory(sharded)
    return max(peaks.values(), key=lambda memory: memory.total)


def resident_bytes(sharded: ShardedModel) -> float:
    """Bytes of weights, gradients and optimizer states, on the pipeline rank with the most."""
    return max(_Rank(sharded, rank).resident_bytes() for rank in _ends(sharded))


def _vision_memory(sharded: ShardedModel) -> Memory:
    """Bytes of one rank that has the vision part: weights, gradients and optimizer states, one
    gathered block, and the activations of a micro-batch."""
    work = sharded.model.vision
    if work is None:
        return Memory()
    train, sizes, compute = sharded.run.train, work.sizes, sharded.compute_bytes
    memory = Memory()
    for tensor in list_vision_tensors(sharded):
        learns = tensor.is_trainable
        memory += Memory(
            weights=tensor.local_bytes,
            gradients=tensor.num_local_elements * sharded.grad_bytes if learns else 0,
            optimizer=state_bytes(train, tensor) if learns else 0,
        )
    blocks = sizes.layers if work.trains_tower else 1
    modules = train.recompute_modules
    is_recomputed = train.enable_gradient_checkpointing and (modules is None or "vision" in modules)
    saved_per_layer = 1 if is_recomputed else SAVED_PER_LAYER
    saved = sizes.width * (blocks * saved_per_layer + SAVED_PER_LAYER) * work.patches_per_row
    gathered = sizes.tower / sizes.layers + sizes.projector if sharded.is_sharded else 0
    return memory + Memory(
        activations=saved * train.rows_at_once * compute, buffers=gathered * compute
    )


def _ends(sharded: ShardedModel) -> set[int]:
    """Pipeline ranks that may have the highest peak: the first has the most activations in flight,
    the last has the head."""
    return {0, sharded.degrees.pipeline - 1}


class _Rank:
    """Memory of one pipeline rank over a step."""

    def __init__(self, sharded: ShardedModel, pipeline: int) -> None:
        self.sharded, self.train = sharded, sharded.run.train
        self.pipeline = pipeline
        self.tensors = list_tensors(sharded, pipeline)
        self.layers = local_layers(sharded, pipeline)
        self.layer_costs = {number: select_layer(sharded, number) for number in self.layers}
        self.units: Mapping[int, list[Tensor]] = {
            unit: [tensor for tensor in self.tensors if tensor.unit == unit]
            for unit in (*self.layers, ROOT, EMBEDDING_UNIT)
        }
        self.num_trainable = {
            unit: sum(tensor.num_elements for tensor in tensors if tensor.is_trainable)
            for unit, tensors in self.units.items()
        }
        self.host = sharded.kind == "cuda" and self.train.enable_fsdp_offload

    def peak(self) -> Memory:
        """Maximum over all moments."""
        return max(self._moments(), key=lambda memory: memory.total)

    def _moments(self) -> Iterator[Memory]:
        resident = self._resident() + Memory(programs=program_bytes(self.sharded))
        flight = self._in_flight()
        yield resident + self._at_forward_end(flight)
        done = 0.0
        if self.sharded.has_edge_units:
            yield resident + self._at_head_reduction(flight)
            done = 0.0 if self.train.fuse_optimizer_step else self._gradients(ROOT)
        for index in reversed(range(len(self.layers))):
            yield from (resident + moment for moment in self._backward(index, done, flight))
            if not self.train.fuse_optimizer_step:
                done += self._gradients(self.layers[index])
        yield resident + self._at_root_reduction(done)
        yield resident + self._at_optimizer_step()

    def _resident(self) -> Memory:
        if self.host:
            return Memory()
        weights = sum(tensor.local_bytes for tensor in self.tensors)
        if self.sharded.kind == "cuda" and self.train.optimizer_offload == "cpu":
            return Memory(weights=weights)
        trainable = [tensor for tensor in self.tensors if tensor.is_trainable]
        states = sum(state_bytes(self.train, tensor) for tensor in trainable)
        return Memory(weights=weights, optimizer=states)

    def resident_bytes(self) -> float:
        """Bytes between the backward pass and the optimizer step."""
        return self._resident().total + self._all_gradients()

    # Saved activations.

    def _saved_bytes(self, layer: Layer) -> float:
        train = self.train
        if not train.enable_gradient_checkpointing:
            return layer.whole
        if train.recompute_modules is None:
            return layer.entry
        saved = layer.stream
        saved += 0 if "self_attn" in train.recompute_modules else layer.attention
        saved += 0 if "mlp" in train.recompute_modules else layer.network
        # The input of each recomputed module is saved.
        return saved + layer.entry * len({*train.recompute_modules} - {"vision"})

    def _recomputed_bytes(self, layer: Layer) -> float:
        """Additional bytes once the layer is recomputed."""
        return max(0.0, layer.whole - self._saved_bytes(layer))

    def _in_flight(self) -> float:
        """Number of micro-batches in flight, whose activations are saved at once."""
        size, train = self.sharded.degrees.pipeline, self.train
        several = self.sharded.micro_batches
        if size == 1:
            return 1
        schedule = train.pipeline_parallel_schedule
        if schedule == "GPipe":
            return several
        if schedule in INTERLEAVED:
            virtual = train.resolved_virtual_stages
            # Forward passes of virtual stages before the first backward one, as PyTorch counts
            # them (_get_warmup_ops), and the one after them.
            first = (virtual - 1) * size + 2 * (size - self.pipeline - 1) + 1
            return min(several, first / virtual)
        if schedule in V_SHAPED:
            return min(several, size)
        # 1F1B: a rank is ahead by one micro-batch for each rank after it.
        return min(several, size - self.pipeline)

    def _saved_activations(self, upto: int, flight: float) -> float:
        """Saved activations of the first `upto` layers, and of other micro-batches in flight."""
        saved = [self._saved_bytes(self.layer_costs[number]) for number in self.layers]
        total = sum(saved[:upto]) + (flight - 1) * sum(saved)
        if self.train.enable_activation_offload and self.sharded.kind == "cuda":
            limit = max(self.train.activation_gpu_limit * 1e9, 2 * max(saved, default=0))
            return min(total, limit)
        return total

    def _held_for_weight_gradients(self) -> float:
        """Activations of micro-batches whose weight gradients a schedule computes later, recomputed
        ones included: about one micro-batch for each rank of the pipeline."""
        size = self.sharded.degrees.pipeline
        if size == 1 or self.train.pipeline_parallel_schedule not in SPLIT_BACKWARD:
            return 0.0
        pending = min(self.sharded.micro_batches, size)
        return pending * sum(self.layer_costs[number].whole for number in self.layers)

    # Gathered or cast weights, and gradients.

    def _gathered_weights(self, unit: int) -> float:
        """Bytes of a unit's gathered or cast weights, in addition to those at rest."""
        sharded = self.sharded
        tensors = self.units[unit]
        if sharded.is_sharded:
            return sum(tensor.gathered_bytes for tensor in tensors)
        if sharded.compute_bytes == sharded.param_bytes:
            return 0
        # Autocast copies trainable matrices; frozen ones are stored in the compute dtype.
        return sum(
            tensor.num_elements * sharded.compute_bytes
            for tensor in tensors
            if tensor.columns > 1 and tensor.width > sharded.compute_bytes
        )

    def _reduce_buffer_bytes(self, unit: int) -> float:
        """Bytes of a unit's unsharded gradients in the reduce dtype."""
        return self.num_trainable[unit] * (2 if self.train.fsdp_reduce_dtype == "bf16" else FP32)

    def _unsharded_gradients(self, unit: int) -> float:
        """Bytes of a unit's unsharded gradients as the backward pass produces them."""
        return self.num_trainable[unit] * self._backward_width()

    def _backward_width(self) -> int:
        # FSDP casts gradients after the backward pass, DDP keeps those of the parameters' dtype.
        return self.sharded.compute_bytes if self.sharded.is_sharded else self.sharded.grad_bytes

    def _gradients(self, unit: int) -> float:
        """Bytes of a unit's reduced gradients: this rank's shard."""
        if self.host:
            return 0
        trainable = (tensor for tensor in self.units[unit] if tensor.is_trainable)
        return sum(tensor.num_local_elements for tensor in trainable) * self.sharded.grad_bytes

    def _all_gradients(self) -> float:
        return sum(self._gradients(unit) for unit in self.units)

    def _accumulated(self) -> float:
        """Accumulated gradients of earlier micro-batches; with fsdp2 unsharded if they are reduced
        once a step."""
        if self.sharded.micro_batches == 1:
            return 0
        if self._accumulates_unsharded:
            # FSDP2 accumulates in the reduce dtype (`to_accumulated_grad_if_needed`, torch 2.13).
            return sum(self._reduce_buffer_bytes(unit) for unit in self.units)
        return self._all_gradients()

    @property
    def _accumulates_unsharded(self) -> bool:
        several = self.sharded.is_sharded and self.sharded.micro_batches > 1
        return several and self.train.resolved_gradient_sync == "step"

    def _live_weights(self, index: int) -> float:
        """Gathered weights in the backward pass of layer `index`: its own, those not resharded
        yet or prefetched, and the root's."""
        sharded = self.sharded
        units = [self._gathered_weights(number) for number in self.layers]
        root = self._root_weights()
        if not sharded.is_sharded:
            if self.train.enable_gradient_checkpointing:
                return root + units[index]
            # Autocast copies are saved for each micro-batch in flight.
            return self._in_flight() * (root + sum(units))
        if sharded.reshard_after != "nothing":
            return root + sum(units[: index + 1] if sharded.reshard_after == "backward" else units)
        if sharded.degrees.pipeline > 1:
            # PyTorch's stages do not reshard after a backward pass before the last of the step.
            return root + sum(units)
        # FSDP2 gathers the layer before during the backward pass; one shard needs no gathering.
        prefetched = units[index - 1] if index and sharded.shards > 1 else 0
        return root + units[index] + prefetched

    def _root_weights(self) -> float:
        """Gathered weights of the embedding and the head in the backward pass of the layers, before
        which a head of its own is resharded."""
        if not self.sharded.has_edge_units:
            return self._gathered_weights(ROOT)
        gathered = {"nothing": [], "backward": [EMBEDDING_UNIT], "step": [EMBEDDING_UNIT, ROOT]}
        return sum(map(self._gathered_weights, gathered[self.sharded.reshard_after]))

    def _reduction_bytes(self, unit: int) -> float:
        """Bytes of a unit's gradients before, in and, on CPUs, copied by gloo for the reduction."""
        reduced = self._unsharded_gradients(unit) + self._reduce_buffer_bytes(unit)
        return reduced + self._gloo_copies(unit)

    def _gloo_copies(self, unit: int) -> float:
        return self._reduce_buffer_bytes(unit) if self.sharded.kind == "cpu" else 0

    # The moments.

    def _at_forward_end(self, flight: float) -> Memory:
        saved = self._saved_activations(len(self.layers), flight)
        buffers = self._live_weights(len(self.layers) - 1) if self.layers else self._root_weights()
        if self.sharded.has_edge_units and self.sharded.reshard_after == "nothing":
            # The layers are resharded, and the output of the all-gather is freed by the next one.
            buffers = 2 * self._gathered_weights(ROOT)
        elif self.sharded.has_edge_units and self.sharded.reshard_after == "backward":
            buffers += self._gathered_weights(ROOT)
        logits, gradients = self._loss()
        return Memory(
            gradients=gradients + self._accumulated(),
            activations=saved,
            logits=logits,
            buffers=buffers,
        )

    def _loss(self) -> tuple[float, float]:
        """(bytes of logits and hidden states at the loss, bytes of the head's gradient)."""
        sharded, config = self.sharded, self.sharded.config
        if not self._ends:
            return 0.0, 0.0
        entries = config.vocab_size / sharded.degrees.tensor
        width = FP32 if sharded.run.model.lm_head_fp32 else sharded.compute_bytes
        # Eager cross-entropy has logits, their fp32 copy, the softmax and its gradient.
        rows, entry_bytes = sharded.tokens, 4 * FP32
        needs_all = isinstance(config, AutoModelConfig) and config.outline.traits.head is None
        if self.train.ce_mode != "eager" and not needs_all:
            entry_bytes = width
            rows = min(rows, tokens_at_once(int(entries * width), sharded.kind))
        hidden = 3 * sharded.tokens * config.hidden_size * width * (1 + config.num_mtp_layers)
        head = 0.0
        if not sharded.run.lora.enable_lora:
            bytes_each = self._backward_width()
            if sharded.kind == "cuda" and sharded.is_sharded and sharded.compute_bytes < FP32:
                # It is summed in fp32 over the chunks, and then cast.
                bytes_each += FP32
            head = entries * config.hidden_size * bytes_each
        return rows * entries * entry_bytes + hidden, head

    @property
    def _ends(self) -> bool:
        last = self.sharded.config.num_layers - 1
        return last in self.layers or not self.layers

    def _at_head_reduction(self, flight: float) -> Memory:
        """The gradient reduction of a head that is an FSDP unit, before the layers' backward."""
        ready = self._accumulated() if self.sharded.micro_batches > 1 else self._gradients(ROOT)
        return Memory(
            gradients=ready,
            activations=self._saved_activations(len(self.layers), flight),
            buffers=self._gathered_weights(ROOT) + self._reduction_bytes(ROOT),
        )

    def _backward(self, index: int, done: float, flight: float) -> Iterator[Memory]:
        """Moments of the backward pass of layer `index`: its start, with all saved activations;
        its end, with all its gradients; and the reduce-scatter of these."""
        unit = self.layers[index]
        layer = self.layer_costs[unit]
        sharded = self.sharded.is_sharded
        head = 0.0 if self.sharded.has_edge_units else self._loss()[1]
        # With gradient accumulation, gradients are added to those of earlier micro-batches.
        before = (done if self.sharded.micro_batches == 1 else self._accumulated()) + head
        fresh = self._unsharded_gradients(unit)
        own = 0.0 if sharded or self.sharded.micro_batches > 1 else fresh
        buffers = self._live_weights(index)
        reducing = self.layers[index + 1 : index + 2] or (
            [ROOT] if self.sharded.has_edge_units else []
        )
        if sharded and not self._accumulates_unsharded:
            # The reduce-scatter input is freed only when the next reduce-scatter begins.
            buffers += sum(map(self._reduce_buffer_bytes, reducing))
        split = self._held_for_weight_gradients()
        saved = self._saved_activations(index, flight) + layer.entry + split
        yield Memory(
            gradients=before,
            activations=self._saved_activations(index + 1, flight)
            + self._recomputed_bytes(layer)
            + layer.gradients
            + split,
            buffers=buffers,
        )
        yield Memory(
            gradients=before + own, activations=saved, buffers=buffers + (fresh if sharded else 0)
        )
        if sharded:
            sums = max(fresh, self._gloo_copies(unit) + self._gradients(unit))
            yield Memory(
                gradients=before,
                activations=saved,
                buffers=self._root_weights() + self._reduce_buffer_bytes(unit) + sums,
            )

    def _at_root_reduction(self, done: float) -> Memory:
        """The gradient reduction of the embedding, and of a head that is not a unit of its own."""
        unit = EMBEDDING_UNIT if self.sharded.has_edge_units else ROOT
        root_gradients = done + self._gradients(unit)
        degrees = self.sharded.degrees
        if not self.sharded.is_sharded:
            # DDP: gradients and all-reduce buckets exist until all buckets are reduced.
            buckets = root_gradients if degrees.num_replicas * degrees.context > 1 else 0
            return Memory(gradients=root_gradients, buffers=buckets + self._gathered_weights(ROOT))
        gradients = root_gradients
        if self._accumulates_unsharded:
            # Of the accumulated gradients, those of all other units are reduced by now.
            gradients += self._reduce_buffer_bytes(unit)
        elif self.sharded.micro_batches > 1:
            gradients = self._accumulated()
        return Memory(gradients=gradients, buffers=self._reduction_bytes(unit))

    def _at_optimizer_step(self) -> Memory:
        if self.train.fuse_optimizer_step:
            return Memory()
        is_kept = self.sharded.is_sharded and self.sharded.reshard_after == "step"
        gathered = sum(map(self._gathered_weights, (ROOT, EMBEDDING_UNIT))) if is_kept else 0
        return Memory(gradients=self._all_gradients(), buffers=gathered)
