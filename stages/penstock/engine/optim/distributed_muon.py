"""Distributed Muon: gather each matrix on one rank, orthogonalize it there, and send it back.

A matrix is one of the checkpoint's: its update does not depend on how ranks shard it, what it is
fused with, or which stack it is in. Ranks that hold a part of it share the work: each owns some
matrices. Matrices are sent in bfloat16, the dtype in which the Newton-Schulz iteration begins and
ends, so nothing is lost.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle, groupby
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import nn

from penstock.adapters.names import parse_lora_name
from penstock.engine.distributed.param_shards import LocalParam, TensorShard
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.models.decoder_config import DecoderConfig
from penstock.models.tp_roles import ParallelStyle, Roles, find_parallel_style
from penstock.optim.muon import MomentumFn, Orthogonalizer

# 128 MiB in bfloat16.
# The largest number of elements a rank gathers at a time, unless one parameter is larger.
GATHER_ELEMENTS = 1 << 26

MUON_STYLES = (
    ParallelStyle.COLWISE,
    ParallelStyle.ROWWISE,
    ParallelStyle.REPLICATED,
    ParallelStyle.EXPERTS,
)


HeadRows = Callable[[str], tuple[int, ...]]
"""The name of a parameter to the numbers of rows of the matrices that its tensors consist of, which
repeat until the last row: those of a head. Empty: a tensor is one matrix."""

ATTENTION_LAYER = re.compile(r"\.layers\.(\d+)\.self_attn\.(\w+)\.(?:weight|bias)$")


def attention_layer(name: str) -> tuple[int, str] | None:
    """The layer number and the linear layer ("q_proj") of a parameter; None for others."""
    match = ATTENTION_LAYER.search(name)
    return (int(match[1]), match[2]) if match else None


def whole_matrices(name: str) -> tuple[int, ...]:
    """No tensor is split."""
    del name
    return ()


def split_by_heads(config: DecoderConfig) -> HeadRows:
    """Each head's queries, keys and values are a matrix."""

    def head_rows(name: str) -> tuple[int, ...]:
        number, layer = attention_layer(name) or (0, "")
        if latent := config.latent:
            of_latent = {"kv_b_proj": (latent.nope_dim, latent.v_dim)}
            of_latent |= dict.fromkeys(("q_proj", "q_b_proj"), (latent.qk_dim,))
            return of_latent.get(layer, ())
        if layer in ("q_proj", "k_proj", "v_proj", "qkv_proj"):
            return (config.of_layer(number).head_dim,)
        return ()

    return head_rows


def is_matrix(local_param: LocalParam, roles: Roles) -> bool:
    """Whether Muon steps it: a matrix of a hidden layer, or a stack of expert matrices.

    Embedding, head, routers, norms, biases and adapters use AdamW: a LoRA factor is half of a
    matrix, and its first update would be zero or random while the other factor has not moved yet.
    """
    module, _, leaf = local_param.name.rpartition(".")
    role = find_parallel_style(module, roles)
    if (
        role not in MUON_STYLES
        or parse_lora_name(local_param.name)
        or not local_param.parameter.is_floating_point()
    ):
        return False
    return local_param.parameter.ndim == 3 if role is ParallelStyle.EXPERTS else leaf == "weight"


@dataclass(frozen=True)
class Box:
    """A part of one matrix, the same on every rank that holds it."""

    matrix: tuple[str, int]
    """The tensor in a checkpoint, and the index of the matrix in its stack."""
    shape: tuple[int, int]
    offsets: tuple[int, int]
    sizes: tuple[int, int]

    @property
    def numel(self) -> int:
        return self.sizes[0] * self.sizes[1]

    def within(self, whole_NK: torch.Tensor) -> torch.Tensor:
        rows, columns = self.offsets
        return whole_NK[rows : rows + self.sizes[0], columns : columns + self.sizes[1]]


@dataclass(frozen=True)
class Message:
    """A box that is sent to the owner of its matrix and comes back orthogonalized."""

    wave: int
    box: Box
    source: int
    owner: int
    holders: tuple[int, ...]
    """All ranks that receive the result."""


def matrix_shards(pieces: Sequence[TensorShard], head_rows: tuple[int, ...] = ()) -> list[Box]:
    """The boxes of all shards, in the order of their rows: for each shard one, or one for each
    matrix of a stack, or of a head."""
    boxes: list[Box] = []
    for piece in pieces:
        # Of a stack, those of its matrices.
        shape = piece.full_shape[-2], piece.full_shape[-1]
        offsets, sizes = (piece.offsets[-2], piece.offsets[-1]), (piece.sizes[-2], piece.sizes[-1])
        if len(piece.full_shape) == 3:
            numbers = range(piece.offsets[0], piece.offsets[0] + piece.sizes[0])
            boxes += [Box((piece.tensor, number), shape, offsets, sizes) for number in numbers]
        elif head_rows:
            boxes += _boxes_of_heads(piece.tensor, shape, offsets, sizes, head_rows)
        else:
            boxes.append(Box((piece.tensor, 0), shape, offsets, sizes))
    return boxes


def _boxes_of_heads(
    tensor: str,
    shape: tuple[int, int],
    offsets: tuple[int, int],
    sizes: tuple[int, int],
    head_rows: tuple[int, ...],
) -> Iterator[Box]:
    """The parts of the heads' matrices that a shard of a tensor of this shape holds."""
    [num_rows, columns], [low, column], high = shape, offsets, offsets[0] + sizes[0]
    repeats = cycle(head_rows)
    heads = [next(repeats) for _ in range(len(head_rows) * num_rows // sum(head_rows))]
    assert sum(heads) == num_rows, f"{tensor} has {num_rows} rows, and heads have {head_rows}"
    for number, (end, rows) in enumerate(zip(accumulate(heads), heads, strict=True)):
        first, last = max(low, end - rows), min(high, end)
        if first < last:
            within = first - (end - rows), column
            yield Box((tensor, number), (rows, columns), within, (last - first, sizes[1]))


def planned(have: Sequence[Sequence[tuple[str, list[Box]]]], at_once: int) -> list[Message]:
    """The messages between ranks, given each rank's parameters by name, with their boxes; the same
    on every rank.

    All matrices of a parameter are orthogonalized in one wave, and waves hold about `at_once`
    elements per rank; parameters at the same position on several ranks share a wave. Matrices are
    assigned greedily, most expensive first, to the least loaded holder.
    """
    order: dict[str, int] = {}
    for rank_params in have:
        for index, (name, _) in enumerate(rank_params):
            order[name] = min(index, order.get(name, index))
    boxes_by_name: dict[str, dict[Box, list[int]]] = {name: {} for name in order}
    for rank, rank_params in enumerate(have):
        for name, boxes in rank_params:
            for box in boxes:
                boxes_by_name[name].setdefault(box, []).append(rank)
    messages: list[Message] = []
    load = [0] * len(have)
    wave, room = -1, 0
    # By name as well: every rank makes the same plan without a message.
    for name in sorted(order, key=lambda name: (order[name], name)):
        params = boxes_by_name[name]
        size = sum(box.numel for box in params)
        if size > room:
            wave, room = wave + 1, at_once * len(have)
        room -= size
        messages += _plan_messages(wave, params, load)
    return messages


def _plan_messages(
    wave: int, params: Mapping[Box, Sequence[int]], load: list[int]
) -> Iterator[Message]:
    """The messages of one parameter's boxes. Adds to the `load` of owners."""
    matrices: dict[tuple[str, int], list[Box]] = {}
    for box in params:
        matrices.setdefault(box.matrix, []).append(box)
    # The name breaks ties: every rank must plan the same.
    for matrix in sorted(matrices, key=lambda name: (-_cost(matrices[name][0]), name)):
        boxes = sorted(matrices[matrix], key=lambda box: box.offsets)
        candidates = sorted({rank for box in boxes for rank in params[box]})
        owner = min(candidates, key=lambda rank: (load[rank], rank))
        load[owner] += _cost(boxes[0])
        for box in boxes:
            holders = params[box]
            # Different holders send to different owners.
            source = owner if owner in holders else holders[owner % len(holders)]
            yield Message(wave, box, source, owner, tuple(holders))


def _cost(box: Box) -> int:
    # Newton-Schulz multiplies by the Gram matrix of the shorter side (Jordan et al. 2024, "Muon").
    rows, columns = box.shape
    return rows * columns * min(rows, columns)


class DistMuon:
    """The orthogonalized updates of sharded matrices. Every rank creates it and calls it at the
    same time, with all its parameters of `params`."""

    def __init__(
        self,
        params: Sequence[LocalParam],
        orthogonalizer: Orthogonalizer,
        ranks: ProcessInfo,
        at_once: int = GATHER_ELEMENTS,
        head_rows: HeadRows = whole_matrices,
    ) -> None:
        self._orthogonalizer, self._ranks = orthogonalizer, ranks
        self._boxes = {
            param.parameter: matrix_shards(param.shards, head_rows(param.name)) for param in params
        }
        self._params = {param.parameter: param for param in params}
        have = [(param.name, self._boxes[param.parameter]) for param in params]
        messages = planned(ranks.all_gather(have), at_once)
        self._waves = [list(wave) for _, wave in groupby(messages, attrgetter("wave"))]
        wave_of = {message.box: message.wave for message in messages}
        # -1 for parameters of which this rank holds nothing.
        self._last_wave = {
            parameter: max((wave_of[box] for box in boxes), default=-1)
            for parameter, boxes in self._boxes.items()
        }

    def __call__(
        self, parameters: Sequence[nn.Parameter], momentum_fn: MomentumFn
    ) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        assert {*parameters} == {*self._params}, "other parameters than in the constructor"
        for wave, messages in enumerate(self._waves):
            of_wave = [param for param in parameters if self._last_wave[param] == wave]
            momenta = {param: momentum_fn(param) for param in of_wave}
            views: dict[Box, torch.Tensor] = {}
            for parameter, momentum in momenta.items():
                views.update(self._box_views(parameter, momentum))
            directions = self._orthogonalized(messages, views)
            for parameter, momentum in momenta.items():
                update = torch.empty_like(momentum, dtype=torch.float32)
                for box, into in self._box_views(parameter, update):
                    into.copy_(directions[box]).mul_(self._orthogonalizer.size(box.shape))
                yield parameter, update
        for parameter in parameters:
            if self._last_wave[parameter] < 0:
                # This rank holds no part of it. Its momentum is requested all the same, because it
                # counts steps.
                yield parameter, momentum_fn(parameter).float()

    def _box_views(
        self, parameter: nn.Parameter, local_tensor: torch.Tensor
    ) -> Iterator[tuple[Box, torch.Tensor]]:
        """The boxes of a parameter, with their views of a tensor like its local part."""
        boxes = iter(self._boxes[parameter])
        for piece in self._params[parameter].shards:
            rows = piece.view(local_tensor).view(-1, piece.sizes[-1])
            first = 0
            while first < len(rows):
                box = next(boxes)
                yield box, rows[first : first + box.sizes[0]]
                first += box.sizes[0]

    def _orthogonalized(
        self, messages: Sequence[Message], momenta: Mapping[Box, torch.Tensor]
    ) -> dict[Box, torch.Tensor]:
        """The orthogonalized update of every local box, in bfloat16."""
        me = self._ranks.rank
        owned = [message for message in messages if message.owner == me]
        arrived = self._exchange(
            [(msg.owner, momenta[msg.box]) for msg in messages if msg.source == me != msg.owner],
            [(msg.source, msg.box) for msg in owned if msg.source != me],
            communicates=any(msg.source != msg.owner for msg in messages),
        )
        boxes = {msg.box: momenta[msg.box] for msg in owned if msg.source == me} | arrived
        full_matrices: dict[tuple[str, int], torch.Tensor] = {}
        for msg in owned:
            if (matrix := msg.box.matrix) not in full_matrices:
                full_matrices[matrix] = torch.empty(
                    msg.box.shape, dtype=torch.bfloat16, device=self._ranks.device
                )
            msg.box.within(full_matrices[matrix]).copy_(boxes[msg.box])
        updates = self._orthogonalizer(list(full_matrices.values()))
        orthogonal = dict(zip(full_matrices, updates, strict=True))
        directions = {msg.box: msg.box.within(orthogonal[msg.box.matrix]) for msg in owned}
        back = self._exchange(
            [(rank, directions[msg.box]) for msg in owned for rank in msg.holders if rank != me],
            [(msg.owner, msg.box) for msg in messages if me in msg.holders and msg.owner != me],
            communicates=any({*msg.holders} != {msg.owner} for msg in messages),
        )
        return directions | back

    def _exchange(
        self,
        outgoing: Sequence[tuple[int, torch.Tensor]],
        incoming: Sequence[tuple[int, Box]],
        *,
        communicates: bool,
    ) -> dict[Box, torch.Tensor]:
        if not communicates:
            return {}
        world, device = self._ranks.world_size, self._ranks.device
        out = [[part for to, part in outgoing if to == rank] for rank in range(world)]
        expected = [[box for source, box in incoming if source == rank] for rank in range(world)]
        parts = [part.reshape(-1).to(device) for of_rank in out for part in of_rank]
        # `cat` takes no empty list, and this rank may have nothing to send.
        empty = torch.empty(0, dtype=torch.bfloat16, device=device)
        # Sent as bytes, which every backend supports.
        sending = torch.cat([empty, *parts]).view(torch.uint8)
        # In bytes: two for each element.
        sends = [2 * sum(part.numel() for part in of_rank) for of_rank in out]
        receives = [2 * sum(box.numel for box in of_rank) for of_rank in expected]
        received = torch.empty(sum(receives), dtype=torch.uint8, device=device)
        dist.all_to_all_single(received, sending, receives, sends)
        boxes = [box for of_rank in expected for box in of_rank]
        cut = received.view(torch.bfloat16).split([box.numel for box in boxes])
        return {box: part.view(box.sizes) for box, part in zip(boxes, cut, strict=True)}
