"""Step time from FLOPs, memory traffic and communication volume. No torch.

The sum of matmuls at their achieved FLOP/s, memory-bound operations, exposed (not overlapped)
communication, the pipeline bubble, and the optimizer. An estimate: kernels, clock rates and other
load change it by up to a third in either direction.
"""

from dataclasses import dataclass, fields

from penstock.config.schema.parallelism import INTERLEAVED, SPLIT_BACKWARD
from penstock.engine.distributed.pipeline_stages import virtual_stages
from penstock.estimate.costs.activations import select_layer
from penstock.estimate.costs.device_speed import NETWORK_BANDWIDTH, Machine
from penstock.estimate.costs.optimizer_states import state_bytes
from penstock.estimate.costs.param_sizes import list_tensors, local_layers
from penstock.estimate.costs.sharded_model import ShardedModel
from penstock.models.flops import Part, Work, core_attention_flops, forward_flops, step_flops

ACTIVATION_PASSES = 4
"""Memory passes over saved activations per step: written and read in the forward pass, read with a
gradient in the backward pass."""

FORWARD_ACTIVATION_PASSES = 2
"""Memory passes for a forward pass only."""

LAUNCH_OVERHEAD_SECONDS = 6e-4
"""Kernel launch overhead of a layer in seconds, forward and backward: 100 kernels of 6
microseconds."""

TO_HOST, OF_HOST = 25e9, 50e9
"""Bytes per second from a GPU to host memory, and host memory bandwidth per GPU."""


EXPOSED_SHARE = 0.1
"""Share of communication that is never overlapped: the first and the last units."""


@dataclass(frozen=True)
class CollectiveCounts:
    """Number of collectives per layer, by parallelism."""

    sums: int
    """All-reduces (tensor parallelism)."""
    exchanges: int
    """All-to-all round trips (Ulysses, states of linear attention, and expert parallelism)."""
    turns: int
    """Ring passes of keys and values (ring attention)."""


# Shoeybi et al. 2019, "Megatron-LM": a sum after attention and one after the network, and the
# same in the backward pass. A ring then sends keys and values, and their gradients.
FORWARD = CollectiveCounts(sums=2, exchanges=1, turns=1)
STEP = CollectiveCounts(sums=4, exchanges=2, turns=3)
STEP_AGAIN = CollectiveCounts(sums=6, exchanges=3, turns=4)
"""A training step without and with activation checkpointing."""


@dataclass(frozen=True)
class Step:
    """Seconds of one optimizer step, or of one forward pass."""

    products: float = 0
    """Matmuls."""
    memory: float = 0
    """Memory-bound operations."""
    communication: float = 0
    """Exposed communication."""
    bubble: float = 0
    """Pipeline bubble."""
    optimizer: float = 0

    @property
    def total(self) -> float:
        """Total seconds."""
        return sum(getattr(self, field.name) for field in fields(self))

    def __add__(self, other: "Step") -> "Step":
        """Add each part."""
        names = [field.name for field in fields(self)]
        return Step(**{name: getattr(self, name) + getattr(other, name) for name in names})


def estimate_step(sharded: ShardedModel, machine: Machine, work: Work) -> Step | None:
    """Time of one optimizer step over `work`, the total of all ranks; None if the speed of the
    machine is unknown."""
    speed, bandwidth = machine.speed(sharded.compute_bytes), machine.bandwidth
    if not speed or not bandwidth:
        return None
    run, degrees, trainable = sharded.run, sharded.degrees, sharded.model.trainable
    flops = step_flops(sharded.config, work, learning=trainable)
    products = (flops + _recompute_flops(sharded, work)) / degrees.world_size / speed
    if run.train.enable_fp8_training and (fp8_speed := machine.speed(1)):
        # Of linear layers alone: attention and logits are not computed in FP8.
        inner = step_flops(sharded.config, Work(work.tokens, 0, 0, 0), learning=trainable)
        products += inner / degrees.world_size * (1 / fp8_speed - 1 / speed)
    if vision := sharded.model.vision:
        # Pipeline stages wait for the first one, whose ranks divide the images.
        rows = sharded.micro_batches * run.train.rows_at_once
        products += vision.flops(rows) / (degrees.tensor * degrees.context) / speed
    # Recomputation repeats the forward pass, two of the four passes over memory.
    factor = 1.5 if run.train.enable_gradient_checkpointing else 1.0
    passes, launching = ACTIVATION_PASSES * factor, LAUNCH_OVERHEAD_SECONDS * factor
    memory = _memory_seconds(sharded, bandwidth, products, passes, launching)
    compute_seconds = products + memory
    counts = STEP_AGAIN if run.train.enable_gradient_checkpointing else STEP
    communication = _exposed_data_parallel(sharded, machine, compute_seconds)
    communication += _layer_communication(sharded, machine, counts)
    bubble = (compute_seconds + communication) * _bubble_share(sharded)
    step = Step(products, memory, communication, bubble, _optimizer_seconds(sharded, bandwidth))
    if run.train.objective == "preference" and run.preference.needs_baseline:
        baseline_pass = estimate_forward(sharded, machine, work)
        assert baseline_pass is not None
        return step + baseline_pass
    return step


def estimate_forward(sharded: ShardedModel, machine: Machine, work: Work) -> Step | None:
    """Time of one forward pass without gradients over `work`, the total of all ranks; None if the
    speed of the machine is unknown."""
    speed, bandwidth = machine.speed(sharded.compute_bytes), machine.bandwidth
    if not speed or not bandwidth:
        return None
    products = forward_flops(sharded.config, work) / sharded.degrees.world_size / speed
    passes, launching = FORWARD_ACTIVATION_PASSES, LAUNCH_OVERHEAD_SECONDS / 3
    memory = _memory_seconds(sharded, bandwidth, products, passes, launching)
    compute_seconds = products + memory
    gathering = (
        _all_gather_seconds(sharded, machine, sharded.micro_batches) if sharded.is_sharded else 0.0
    )
    communication = _exposed(gathering, compute_seconds)
    communication += _layer_communication(sharded, machine, FORWARD)
    bubble = (compute_seconds + communication) * _bubble_share(sharded)
    return Step(products, memory, communication, bubble)


def _memory_seconds(
    sharded: ShardedModel, bandwidth: float, products: float, passes: float, launching: float
) -> float:
    """Seconds of memory-bound operations beside `products` seconds of matmuls: `passes` over saved
    activations; on GPUs at least what it takes to launch a layer's kernels in `launching` seconds,
    which small layers are bound by."""
    layers, num_micro_batches = local_layers(sharded, 0), sharded.micro_batches
    saved = sum(select_layer(sharded, number).whole for number in layers)
    seconds = passes * saved * num_micro_batches / bandwidth
    if sharded.kind == "cuda":
        return max(seconds, launching * len(layers) * num_micro_batches - products)
    return seconds


def _exposed(seconds: float, compute_seconds: float) -> float:
    """Seconds of communication that is not overlapped with compute."""
    return max(seconds - compute_seconds, EXPOSED_SHARE * seconds)


def _recompute_flops(sharded: ShardedModel, work: Work) -> float:
    """FLOPs of recomputation (activation checkpointing)."""
    train = sharded.run.train
    if not train.enable_gradient_checkpointing:
        return 0.0
    names: dict[str, Part] = {"self_attn": "attention", "mlp": "network"}
    chosen: list[str] = [*(train.recompute_modules or names)]
    parts: list[Part] = [names[name] for name in chosen if name in names]
    core = core_attention_flops(sharded.config, work) if "core_attn" in chosen else 0.0
    return forward_flops(sharded.config, work, parts=parts) + core


def _link_bandwidth(machine: Machine, ranks: int, inner: int) -> float:
    """Bytes per second among `ranks` ranks with a stride of `inner` ranks."""
    is_local = ranks * inner <= machine.ranks_per_node
    return machine.link if is_local else min(machine.link, NETWORK_BANDWIDTH)


def _exposed_data_parallel(
    sharded: ShardedModel, machine: Machine, compute_seconds: float
) -> float:
    """Seconds of weight and gradient communication (FSDP, DDP) not overlapped with compute."""
    degrees, num_micro_batches = sharded.degrees, sharded.micro_batches
    tensors = list_tensors(sharded)
    gradients = sum(t.num_elements * 4 for t in tensors if t.is_trainable)
    if sharded.is_sharded:
        shards, copies = sharded.shards, degrees.replicate
        # A forward and a backward pass each gather what is not kept since the one before.
        gathers = {"nothing": 2 * num_micro_batches, "backward": num_micro_batches, "step": 1}
        seconds = _all_gather_seconds(sharded, machine, gathers[sharded.reshard_after])
        reduced_once = sharded.run.train.resolved_gradient_sync == "step"
        scatters = 1 if reduced_once else num_micro_batches
        share = (shards - 1) / shards
        seconds += scatters * share * gradients / _shard_bandwidth(sharded, machine)
        reduced = gradients / shards
    else:
        seconds, shards, reduced = 0.0, 1, gradients
        copies = degrees.num_replicas * degrees.context
    if copies > 1:
        has_context = not sharded.is_sharded or shards > degrees.shard
        speed = _link_bandwidth(machine, copies * shards, _stride(sharded, has_context))
        # A ring all-reduce: a reduce-scatter and an all-gather, each of (n - 1) / n of the bytes.
        seconds += 2 * (copies - 1) / copies * reduced / speed
    return _exposed(seconds, compute_seconds)


def _all_gather_seconds(sharded: ShardedModel, machine: Machine, times: int) -> float:
    """Seconds of `times` all-gathers of all weights over the FSDP shards."""
    weights = sum(tensor.gathered_bytes for tensor in list_tensors(sharded))
    share = (sharded.shards - 1) / sharded.shards
    return share * weights * times / _shard_bandwidth(sharded, machine)


def _shard_bandwidth(sharded: ShardedModel, machine: Machine) -> float:
    has_context = sharded.shards > sharded.degrees.shard
    return _link_bandwidth(machine, sharded.shards, _stride(sharded, has_context))


def _stride(sharded: ShardedModel, has_context: bool) -> int:
    """The ranks from one to the next of a data-parallel group; `has_context`: the context-parallel
    ranks, which lie between those of the shard axis, are among them."""
    degrees = sharded.degrees
    return degrees.tensor if has_context else degrees.tensor * degrees.context


def _layer_communication(sharded: ShardedModel, machine: Machine, times: CollectiveCounts) -> float:
    """Seconds of communication within the layers (TP, Ulysses, ring, EP)."""
    degrees, config, width = sharded.degrees, sharded.config, sharded.compute_bytes
    stream = sharded.tokens * config.hidden_size * width
    layers, seconds = len(local_layers(sharded, 0)), 0.0
    if degrees.tensor > 1:
        # An all-reduce, or with sequence parallelism its two halves, which move as much.
        share = 2 * (degrees.tensor - 1) / degrees.tensor
        speed = _link_bandwidth(machine, degrees.tensor, 1)
        seconds += layers * times.sums * share * stream / speed
    softmax = layers * config.softmax_layers / config.num_layers
    if degrees.ulysses > 1:
        heads = config.num_attention_heads + config.num_key_value_heads
        sent = sharded.tokens * 2 * heads * config.attention_dim * width / degrees.tensor
        share = (degrees.ulysses - 1) / degrees.ulysses
        speed = _link_bandwidth(machine, degrees.ulysses, degrees.tensor)
        seconds += softmax * times.exchanges * share * sent / speed
    if degrees.ring > 1:
        sent = sharded.tokens * 2 * config.num_key_value_heads * config.attention_dim * width
        speed = _link_bandwidth(machine, degrees.ring, degrees.tensor * degrees.ulysses)
        # Most of it overlaps with computing the previous block.
        seconds += 0.3 * softmax * times.turns * (degrees.ring - 1) * sent / speed
    if degrees.context > 1 and config.linear:
        exchanged = config.linear.exchanged_by_rank(degrees.tensor, degrees.context)
        sent = sharded.tokens * degrees.context * exchanged * width
        share = (degrees.context - 1) / degrees.context
        speed = _link_bandwidth(machine, degrees.context, degrees.tensor)
        recurrent = layers * len(config.linear_layers) / config.num_layers
        seconds += recurrent * times.exchanges * share * sent / speed
    if degrees.expert > 1 and config.experts:
        sent = stream * config.experts.experts_per_token
        share = (degrees.expert - 1) / degrees.expert
        sparse = len(config.experts.layers) / config.num_layers * layers
        speed = _link_bandwidth(machine, degrees.expert, 1)
        seconds += sparse * 2 * times.exchanges * share * sent / speed
    return seconds * sharded.micro_batches


def _bubble_share(sharded: ShardedModel) -> float:
    """Pipeline bubble as a fraction of compute and communication time."""
    size, train = sharded.degrees.pipeline, sharded.run.train
    if size == 1:
        return 0.0
    schedule = train.pipeline_parallel_schedule
    # Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using
    # Megatron-LM", section 2.2: (p - 1) / m, divided by the virtual stages if interleaved.
    waits = (size - 1) / sharded.micro_batches
    if schedule in INTERLEAVED:
        waits /= virtual_stages(train)
    # With a split backward pass, weight gradients fill most of the bubble (Qi et al. 2023, "Zero
    # bubble pipeline parallelism").
    return waits / 3 if schedule in SPLIT_BACKWARD else waits


def _optimizer_seconds(sharded: ShardedModel, bandwidth: float) -> float:
    """Seconds of the optimizer step: weights and states are read and written, and gradients read
    twice (for the gradient norm and for the update)."""
    learning = [tensor for tensor in list_tensors(sharded) if tensor.is_trainable]
    states = sum(state_bytes(sharded.run.train, tensor) for tensor in learning)
    weights = sum(tensor.local_bytes for tensor in learning)
    read_and_written = 2 * (states + weights) + 2 * weights
    train = sharded.run.train
    if sharded.kind == "cuda" and (train.enable_fsdp_offload or train.optimizer_offload == "cpu"):
        # Gradients and weights are copied over PCIe, and the CPU updates everything.
        return 2 * weights / TO_HOST + read_and_written / OF_HOST
    return read_and_written / bandwidth
