"""Step time from FLOPs, memory traffic and communication volume. No torch.

The sum of matmuls at their achieved FLOP/s, memory-bound operations, exposed (not overlapped)
communication, the pipeline bubble, and the optimizer. An estimate: kernels, clock rates and other
load change it by up to a third in either direction.
"""

from dataclasses import dataclass, fields

from penstock.config.schema.parallelism import INTERLEAVED, SPLIT_BACKWARD
from penstock.costs.activations import select_layer
from penstock.costs.device_speed import NETWORK, Machine
from penstock.costs.optimizer_states import state_bytes
from penstock.costs.param_sizes import held, layers_here
from penstock.costs.sharded_model import Cut
from penstock.engine.distributed.pipeline_stages import virtual_stages
from penstock.models.flops import Part, Work, core_attention_flops, forward_flops, step_flops

TOUCHED = 4
"""Memory passes over saved activations per step: written and read in the forward pass, read with a
gradient in the backward pass."""

TOUCHED_ONCE = 2
"""Memory passes for a forward pass only."""

STARTING = 6e-4
"""Kernel launch overhead of a layer in seconds, forward and backward: 100 kernels of 6
microseconds."""

TO_HOST, OF_HOST = 25e9, 50e9
"""Bytes per second from a GPU to host memory, and host memory bandwidth per GPU."""


NEVER_HIDDEN = 0.1
"""Share of communication that is never overlapped: the first and the last units."""


@dataclass(frozen=True)
class Times:
    """Number of collectives per layer, by parallelism."""

    sums: int
    """All-reduces (tensor parallelism)."""
    exchanges: int
    """All-to-all round trips (Ulysses and expert parallelism)."""
    turns: int
    """Ring passes of keys and values (ring attention)."""


FORWARD = Times(sums=2, exchanges=1, turns=1)
STEP = Times(sums=4, exchanges=2, turns=3)
STEP_AGAIN = Times(sums=6, exchanges=3, turns=4)
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
        return sum(getattr(self, one.name) for one in fields(self))

    def with_others(self, other: "Step") -> "Step":
        """The sum of both."""
        return Step(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


def estimate_step(cut: Cut, machine: Machine, work: Work) -> Step | None:
    """Time of one optimizer step over `work`, the total of all ranks; None if the speed of the
    machine is unknown."""
    speed, bandwidth = machine.speed(cut.computes), machine.bandwidth
    if not speed or not bandwidth:
        return None
    ranks = cut.degrees.world_size
    flops = step_flops(cut.config, work, learning=cut.model.learning)
    products = (flops + _again(cut, work)) / ranks / speed
    if cut.run.train.enable_fp8_training and (eight := machine.speed(1)):
        inner = step_flops(cut.config, Work(work.tokens, 0, 0, 0), learning=cut.model.learning)
        products += inner / ranks * (1 / eight - 1 / speed)
    passes = cut.micro_batches
    layers = layers_here(cut, 0)
    kept = sum(select_layer(cut, number).whole for number in layers)
    again = 1.5 if cut.run.train.enable_gradient_checkpointing else 1.0
    memory = TOUCHED * again * kept * passes / bandwidth
    if cut.kind == "cuda":
        # Small layers are bound by kernel launch overhead.
        memory = max(memory, again * STARTING * len(layers) * passes - products)
    computing = products + memory
    again_too = STEP_AGAIN if cut.run.train.enable_gradient_checkpointing else STEP
    sending = _exposed(cut, machine, computing)
    sending += _in_layers(cut, machine, len(layers), again_too) * passes
    bubble = (computing + sending) * _bubble(cut)
    step = Step(products, memory, sending, bubble, _optimizer(cut, bandwidth))
    run = cut.run
    if run.train.objective == "preference" and run.preference.needs_baseline:
        looking = estimate_forward(cut, machine, work)
        assert looking is not None
        return step.with_others(looking)
    return step


def estimate_forward(cut: Cut, machine: Machine, work: Work) -> Step | None:
    """Time of one forward pass without gradients over `work`, the total of all ranks; None if the
    speed of the machine is unknown."""
    speed, bandwidth = machine.speed(cut.computes), machine.bandwidth
    if not speed or not bandwidth:
        return None
    passes, layers = cut.micro_batches, layers_here(cut, 0)
    products = forward_flops(cut.config, work) / cut.degrees.world_size / speed
    kept = sum(select_layer(cut, number).whole for number in layers)
    memory = TOUCHED_ONCE * kept * passes / bandwidth
    if cut.kind == "cuda":
        memory = max(memory, STARTING / 3 * len(layers) * passes - products)
    computing = products + memory
    gathering = _gathering(cut, machine, passes) if cut.is_sharded else 0.0
    sending = max(gathering - computing, NEVER_HIDDEN * gathering)
    sending += _in_layers(cut, machine, len(layers), FORWARD) * passes
    return Step(products, memory, sending, (computing + sending) * _bubble(cut))


def _again(cut: Cut, work: Work) -> float:
    """FLOPs of recomputation (activation checkpointing)."""
    train = cut.run.train
    if not train.enable_gradient_checkpointing:
        return 0.0
    names: dict[str, Part] = {"self_attn": "attention", "mlp": "network"}
    chosen: list[str] = [*(train.recompute_modules or names)]
    parts: list[Part] = [names[name] for name in chosen if name in names]
    core = core_attention_flops(cut.config, work) if "core_attn" in chosen else 0.0
    return forward_flops(cut.config, work, parts=parts) + core


def _between(machine: Machine, ranks: int, inner: int) -> float:
    """Bytes per second among `ranks` ranks with a stride of `inner` ranks."""
    return machine.link if ranks * inner <= machine.local else min(machine.link, NETWORK)


def _exposed(cut: Cut, machine: Machine, computing: float) -> float:
    """Seconds of weight and gradient communication (FSDP, DDP) not overlapped with compute."""
    degrees, passes = cut.degrees, cut.micro_batches
    tensors = held(cut)
    inner = degrees.tensor * degrees.context
    gradients = sum(t.numbers * 4 for t in tensors if t.learns)
    if cut.is_sharded:
        shards = cut.shards
        times = {"nothing": 2 * passes, "backward": passes, "step": 1}[cut.kept]
        seconds = _gathering(cut, machine, times)
        seconds += (shards - 1) / shards * gradients / _between_shards(cut, machine)
        copies = degrees.replicate
        mine = gradients / shards
    else:
        seconds = 0.0
        copies, mine = degrees.num_replicas * degrees.context, gradients
    if copies > 1:
        speed = _between(machine, copies * (cut.shards if cut.is_sharded else 1), inner)
        seconds += 2 * (copies - 1) / copies * mine / speed
    return max(seconds - computing, NEVER_HIDDEN * seconds)


def _gathering(cut: Cut, machine: Machine, times: int) -> float:
    """Seconds of `times` all-gathers of all weights over the FSDP shards."""
    weights = sum(tensor.gathered for tensor in held(cut))
    return (cut.shards - 1) / cut.shards * weights * times / _between_shards(cut, machine)


def _between_shards(cut: Cut, machine: Machine) -> float:
    inner = cut.degrees.tensor * cut.degrees.context
    return _between(machine, cut.shards, 1 if cut.shards > cut.degrees.shard else inner)


def _in_layers(cut: Cut, machine: Machine, layers: int, times: Times) -> float:
    """Seconds of communication within the layers for one micro-batch (TP, Ulysses, ring, EP)."""
    degrees, config, width = cut.degrees, cut.config, cut.computes
    stream = cut.tokens * config.hidden_size * width
    seconds = 0.0
    if degrees.tensor > 1:
        share = 2 * (degrees.tensor - 1) / degrees.tensor
        speed = _between(machine, degrees.tensor, 1)
        seconds += layers * times.sums * share * stream / speed
    if degrees.ulysses > 1:
        heads = config.num_attention_heads + config.num_key_value_heads
        sent = cut.tokens * 2 * heads * config.head_dim * width / degrees.tensor
        share = (degrees.ulysses - 1) / degrees.ulysses
        speed = _between(machine, degrees.ulysses, degrees.tensor)
        seconds += layers * times.exchanges * share * sent / speed
    if degrees.ring > 1:
        sent = cut.tokens * 2 * config.num_key_value_heads * config.head_dim * width
        speed = _between(machine, degrees.ring, degrees.tensor * degrees.ulysses)
        # Most of it overlaps with computing the previous block.
        seconds += 0.3 * layers * times.turns * (degrees.ring - 1) * sent / speed
    if degrees.expert > 1 and config.experts:
        sent = stream * config.experts.experts_per_token
        share = (degrees.expert - 1) / degrees.expert
        sparse = len(config.experts.layers) / config.num_hidden_layers * layers
        speed = _between(machine, degrees.expert, 1)
        seconds += sparse * 2 * times.exchanges * share * sent / speed
    return seconds


def _bubble(cut: Cut) -> float:
    """Pipeline bubble as a fraction of compute and communication time."""
    size, train = cut.degrees.pipeline, cut.run.train
    if size == 1:
        return 0.0
    schedule = train.pipeline_parallel_schedule
    waits = (size - 1) / cut.micro_batches
    if schedule in INTERLEAVED:
        waits /= virtual_stages(train)
    # With a split backward pass, weight gradients fill most of the bubble.
    return waits / 3 if schedule in SPLIT_BACKWARD else waits


def _optimizer(cut: Cut, bandwidth: float) -> float:
    """Seconds of the optimizer step: weights and states are read and written, and gradients read
    twice (for the gradient norm and for the update)."""
    learning = [tensor for tensor in held(cut) if tensor.learns]
    states = sum(state_bytes(cut.run.train, tensor) for tensor in learning)
    mine = sum(tensor.at_rest for tensor in learning)
    read_and_written = 2 * (states + mine) + 2 * mine
    train = cut.run.train
    if cut.kind == "cuda" and (train.enable_fsdp_offload or train.optimizer_offload == "cpu"):
        # Gradients and weights are copied over PCIe, and the CPU updates everything.
        return 2 * mine / TO_HOST + read_and_written / OF_HOST
    return read_and_written / bandwidth
