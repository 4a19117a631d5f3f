"""How long a step takes, from how much is computed, read and sent. No torch.

Products, at the speed that they reach; what reads and writes memory beside them; what is sent and
nothing hides; the bubble of a pipeline; and the optimizer. An estimate: kernels, clocks and other
work on a machine shift it by a third either way.
"""

from dataclasses import dataclass, fields

from penstock.config.parallel import INTERLEAVED, SPLIT_BACKWARD
from penstock.costs.activations import layer_of
from penstock.costs.cut import Cut
from penstock.costs.holding import held, layers_here
from penstock.costs.machines import NETWORK, Machine
from penstock.costs.states import state_bytes
from penstock.engine.parallel.split import virtual_stages
from penstock.models.cost import Part, Work, forward_flops, step_flops

TOUCHED = 4
"""How often what a layer keeps passes through memory in a step: it is written and read forward, and
read beside a gradient backward."""

STARTING = 6e-4
"""Seconds in which a processor starts the kernels of a layer, forward and backward: a hundred, at
6 microseconds."""

TO_HOST, OF_HOST = 25e9, 50e9
"""Bytes a second from a GPU to its host's memory, and of that memory for each GPU."""


@dataclass(frozen=True)
class Step:
    """Seconds of one optimizer step."""

    products: float = 0
    memory: float = 0
    """What reads and writes memory, and multiplies little."""
    communication: float = 0
    """What others wait for."""
    bubble: float = 0
    """What a pipeline's ranks wait for one another."""
    optimizer: float = 0

    @property
    def total(self) -> float:
        """All of it."""
        return sum(getattr(self, one.name) for one in fields(self))


def step_of(cut: Cut, machine: Machine, work: Work) -> Step | None:
    """One step over `work`, of all ranks together; None where nobody knows how fast they are."""
    speed, bandwidth = machine.speed(cut.computes), machine.bandwidth
    if not speed or not bandwidth:
        return None
    ranks = cut.degrees.world
    flops = step_flops(cut.config, work, learning=cut.model.learning)
    products = (flops + _again(cut, work)) / ranks / speed
    if cut.run.train.enable_fp8_training and (eight := machine.speed(1)):
        inner = step_flops(cut.config, Work(work.tokens, 0, 0, 0), learning=cut.model.learning)
        products += inner / ranks * (1 / eight - 1 / speed)
    passes = cut.micro_batches
    layers = layers_here(cut, 0)
    kept = sum(layer_of(cut, number).whole for number in layers)
    again = 1.5 if cut.run.train.enable_gradient_checkpointing else 1.0
    memory = TOUCHED * again * kept * passes / bandwidth
    if cut.kind == "cuda":
        # Small layers wait for the processor that starts their kernels.
        memory = max(memory, again * STARTING * len(layers) * passes - products)
    computing = products + memory
    sending = _exposed(cut, machine, computing) + _in_layers(cut, machine, len(layers)) * passes
    bubble = (computing + sending) * _bubble(cut)
    return Step(products, memory, sending, bubble, _optimizer(cut, bandwidth))


def _again(cut: Cut, work: Work) -> float:
    """Operations of what is computed a second time."""
    train = cut.run.train
    if not train.enable_gradient_checkpointing:
        return 0.0
    names: dict[str, Part] = {"self_attn": "attention", "mlp": "network"}
    chosen = train.recompute_modules or list(names)
    return forward_flops(cut.config, work, parts=[names[name] for name in chosen])


def _between(machine: Machine, ranks: int, inner: int) -> float:
    """Bytes a second between so many ranks, of which each is `inner` ranks from the next."""
    return machine.link if ranks * inner <= machine.local else min(machine.link, NETWORK)


def _exposed(cut: Cut, machine: Machine, computing: float) -> float:
    """Seconds that weights and gradients are on their way, and nothing is computed meanwhile."""
    degrees, passes = cut.degrees, cut.micro_batches
    tensors = held(cut)
    inner = degrees.tensor * degrees.context
    gradients = sum(t.numbers * 4 for t in tensors if t.learns)
    if cut.is_sharded:
        shards = cut.shards
        speed = _between(machine, shards, 1 if cut.shards > degrees.shard else inner)
        share = (shards - 1) / shards
        weights = sum(tensor.gathered for tensor in tensors)
        times = {"nothing": 2 * passes, "backward": passes, "step": 1}[cut.kept]
        seconds = share * (weights * times + gradients) / speed
        copies = degrees.replicate
        mine = gradients / shards
    else:
        seconds = 0.0
        copies, mine = degrees.num_replicas * degrees.context, gradients
    if copies > 1:
        speed = _between(machine, copies * (cut.shards if cut.is_sharded else 1), inner)
        seconds += 2 * (copies - 1) / copies * mine / speed
    # A tenth is never hidden: the first units and the last.
    return max(seconds - computing, 0.1 * seconds)


def _in_layers(cut: Cut, machine: Machine, layers: int) -> float:
    """Seconds that layers of one micro-batch wait for other ranks, forward and backward."""
    degrees, config, width = cut.degrees, cut.config, cut.computes
    again = 1 if cut.run.train.enable_gradient_checkpointing else 0
    stream = cut.tokens * config.hidden_size * width
    seconds = 0.0
    if degrees.tensor > 1:
        share = 2 * (degrees.tensor - 1) / degrees.tensor
        speed = _between(machine, degrees.tensor, 1)
        seconds += layers * (4 + 2 * again) * share * stream / speed
    if degrees.ulysses > 1:
        heads = config.num_attention_heads + config.num_key_value_heads
        sent = cut.tokens * 2 * heads * config.head_dim * width / degrees.tensor
        share = (degrees.ulysses - 1) / degrees.ulysses
        speed = _between(machine, degrees.ulysses, degrees.tensor)
        seconds += layers * (2 + again) * share * sent / speed
    if degrees.ring > 1:
        sent = cut.tokens * 2 * config.num_key_value_heads * config.head_dim * width
        speed = _between(machine, degrees.ring, degrees.tensor * degrees.ulysses)
        # Most of it travels while the block before is computed.
        seconds += 0.3 * layers * (3 + again) * (degrees.ring - 1) * sent / speed
    if degrees.expert > 1 and config.experts:
        sent = stream * config.experts.experts_per_token
        share = (degrees.expert - 1) / degrees.expert
        sparse = len(config.experts.layers) / config.num_hidden_layers * layers
        speed = _between(machine, degrees.expert, 1)
        seconds += sparse * 2 * (2 + again) * share * sent / speed
    return seconds


def _bubble(cut: Cut) -> float:
    """What a rank waits for others of its pipeline, beside what it computes."""
    size, train = cut.degrees.pipeline, cut.run.train
    if size == 1:
        return 0.0
    schedule = train.pipeline_parallel_schedule
    waits = (size - 1) / cut.micro_batches
    if schedule in INTERLEAVED:
        waits /= virtual_stages(train)
    # Weights' gradients fill most of what is left.
    return waits / 3 if schedule in SPLIT_BACKWARD else waits


def _optimizer(cut: Cut, bandwidth: float) -> float:
    """Weights and states are read and written, gradients read, for the norm and for the step."""
    learning = [tensor for tensor in held(cut) if tensor.learns]
    states = sum(state_bytes(cut.run.train, tensor) for tensor in learning)
    mine = sum(tensor.at_rest for tensor in learning)
    read_and_written = 2 * (states + mine) + 2 * mine
    train = cut.run.train
    if cut.kind == "cuda" and (train.enable_fsdp_offload or train.optimizer_offload == "cpu"):
        # Gradients and weights travel, and the processor goes through all of it.
        return 2 * mine / TO_HOST + read_and_written / OF_HOST
    return read_and_written / bandwidth
