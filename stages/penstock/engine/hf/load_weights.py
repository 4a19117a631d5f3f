"""Load weights into an empty sharded model from safetensors or a seed, in blocks of rows.

A rank holds only a few blocks besides its own parameters, never a full tensor.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from penstock.adapters.names import parse_lora_name
from penstock.core.errors import CapabilityError
from penstock.engine.distributed.param_shards import LocalParam, TensorShard, local
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.hf.read_ahead import BoxToRead, read_ahead
from penstock.engine.hf.safetensors_reader import SafetensorsFolder, narrow
from penstock.engine.hf.weight_files import require_shape
from penstock.engine.quantization.quantized_reader import QuantizeOnLoad, TensorReader

Start = Callable[[str, tuple[int, ...]], torch.Tensor]
"""Function from a checkpoint tensor's name and full shape to its initial value, on the CPU."""

ToReader = Callable[[SafetensorsFolder], TensorReader]
"""Wraps a folder's reader, for example to quantize matrices."""

Readers = Literal["first_rank", "all_ranks"]

# Bytes of a tensor that are read and sent at a time: enough for a parallel file system.
BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class _Box:
    """A box of a checkpoint tensor, and the local tensor to load it into."""

    piece: TensorShard
    into: torch.Tensor


@torch.no_grad()
def load_weights(
    params: Sequence[LocalParam],
    weights: Path | None,
    start: Start,
    *,
    readers: Readers,
    ranks: ProcessInfo,
    to_reader: ToReader = lambda folder: folder,
) -> None:
    """Load every parameter. Every rank calls it, with its own parameters allocated.

    Tensors come from `weights`, a folder of safetensors wrapped by `to_reader`; adapters, and
    without a folder all tensors, come from `start` on every rank. With `all_ranks` each rank reads
    its own shards. With `first_rank` only rank 0 reads, each byte once, and sends the others their
    shards: in each group of ranks with the same shards (`LocalParam.replica_group`) to the first,
    which broadcasts it.

    Raises CapabilityError, on every rank, for tensors that are missing, have another shape, or hold
    NaN or infinity.
    """
    stored: list[LocalParam] = []
    for param in params:
        is_adapter = any(parse_lora_name(piece.tensor) for piece in param.shards)
        if weights is not None and not is_adapter:
            stored.append(param)
            continue
        # Without communication: initial values follow from name and seed.
        for piece in param.shards:
            full_tensor = start(piece.tensor, piece.full_shape)
            copy_shard(full_tensor, piece, piece.view(local(param.parameter)))
    if weights is None:
        return
    boxes = _boxes(stored)
    pin_memory = ranks.device.type == "cuda"
    if readers == "all_ranks" or ranks.world_size == 1:
        with SafetensorsFolder(weights, pin_memory=pin_memory) as folder:
            _read(boxes, to_reader(folder), ranks)
        _require_finite(boxes, weights, ranks)
        return
    receiving = [
        param
        for param in stored
        if param.replica_group is None or dist.get_rank(param.replica_group) == 0
    ]
    # A separate group: P2P messages must not be counted among the collectives of all ranks.
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    with SafetensorsFolder(weights, pin_memory=pin_memory) as folder:
        reader = to_reader(folder) if ranks.is_main_process else None
        _receive(_boxes(receiving), reader, ranks, group)
    dist.destroy_process_group(group)
    for param in stored:
        if param.replica_group is not None:
            _broadcast(local(param.parameter), param.replica_group, ranks.device)
    _require_finite(boxes, weights, ranks)


def _require_finite(boxes: Sequence[_Box], weights: Path, ranks: ProcessInfo) -> None:
    local_names: list[str] = []
    for box in boxes:
        # Codes of quantized weights are not looked at.
        if box.into.is_floating_point() and box.into.dtype.itemsize > 1:
            # A sum needs no tensor of the same size; finite values may overflow it.
            is_finite = box.into.sum(dtype=torch.float32).isfinite() or box.into.isfinite().all()
            local_names += [] if is_finite else [box.piece.tensor]
    names = sorted({name for of_rank in ranks.all_gather(local_names) for name in of_rank})
    if names:
        raise CapabilityError(
            f"{len(names)} tensors of {weights} hold NaN or infinity, first {names[0]}: a model "
            "with them has no loss.\n"
            "  Fetch or export the weights again; if they are an earlier run's, take a checkpoint "
            "before its loss was NaN."
        )


def _boxes(params: Sequence[LocalParam]) -> list[_Box]:
    return [
        _Box(piece, piece.view(local(param.parameter).detach()))
        for param in params
        for piece in param.shards
    ]


def copy_shard(full_tensor: torch.Tensor, piece: TensorShard, into: torch.Tensor) -> None:
    """Copy the box of a full tensor to the local tensor."""
    into.copy_(narrow(full_tensor, piece.offsets, piece.sizes))


def _read(boxes: Sequence[_Box], folder: TensorReader, ranks: ProcessInfo) -> None:
    shapes = {box.piece.tensor: box.piece.full_shape for box in boxes}
    _check(folder, shapes)
    if isinstance(folder, QuantizeOnLoad):
        folder.measure(shapes, ranks)
    into: list[torch.Tensor] = []
    blocks: list[BoxToRead] = []
    # In the order of the files, so that each is read from its beginning to its end.
    for box in sorted(boxes, key=lambda box: (folder.order(box.piece.tensor), box.piece.offsets)):
        piece = box.piece
        for first, end in row_blocks(piece.sizes, folder.stored(piece.tensor).dtype):
            offsets = (piece.offsets[0] + first, *piece.offsets[1:])
            into.append(box.into[first:end])
            blocks.append(BoxToRead(piece.tensor, offsets, (end - first, *piece.sizes[1:])))
    for rows_into, rows in zip(into, read_ahead(folder, blocks, ranks.device), strict=True):
        # To the device first: a copy that also converts does so on the CPU, and waits for it.
        rows_into.copy_(rows.to(rows_into.device, non_blocking=True))


def _check(folder: TensorReader, shapes: dict[str, tuple[int, ...]]) -> None:
    folder.require(shapes)
    for name, shape in shapes.items():
        require_shape(name, folder.stored(name).shape, shape)


def row_blocks(shape: Sequence[int], dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    """The first and end row of each block of a tensor or box."""
    row = dtype.itemsize
    for size in shape[1:]:
        row *= size
    step = max(1, BLOCK_BYTES // max(1, row))
    for first in range(0, shape[0], step):
        yield first, min(first + step, shape[0])


def _receive(
    boxes: Sequence[_Box],
    folder: TensorReader | None,
    ranks: ProcessInfo,
    group: dist.ProcessGroup,
) -> None:
    """Rank 0, which has the `folder`, reads each tensor once and sends each rank its boxes."""
    wishes: list[list[TensorShard]] = [[] for _ in range(ranks.world_size)]
    dist.gather_object(
        [box.piece for box in boxes], wishes if ranks.is_main_process else None, dst=0, group=group
    )
    order = _agree_on_order(folder, wishes, group)
    local_boxes: dict[str, list[_Box]] = {}
    for box in boxes:
        local_boxes.setdefault(box.piece.tensor, []).append(box)
    # All ranks go through the same blocks in the same order, so sends and receives pair up.
    blocks = [
        (name, first, end)
        for name, (shape, dtype) in order.items()
        for first, end in row_blocks(shape, dtype)
    ]
    if folder is None:
        for name, first, end in blocks:
            for box in local_boxes.get(name, ()):
                _receive_rows(box, first, end, order[name][1], ranks.device, group)
        return
    sender = _Sender(wishes, ranks.device, group)
    to_read = [
        BoxToRead(name, (first, *(0 for _ in columns)), (end - first, *columns))
        for name, first, end in blocks
        for columns in [order[name][0][1:]]
    ]
    rows_of_blocks = read_ahead(folder, to_read, ranks.device)
    for (name, first, end), rows in zip(blocks, rows_of_blocks, strict=True):
        sender.block(name, first, end, rows, local_boxes.get(name, ()))
    sender.finish()


def _agree_on_order(
    folder: TensorReader | None,
    wishes: Sequence[Sequence[TensorShard]],
    group: dist.ProcessGroup,
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The shape and stored dtype of every requested tensor, in the order they will be sent. The
    same on all ranks, of which rank 0 has the `folder`."""
    answer: list[object] = [None]
    if folder:
        shapes = {piece.tensor: piece.full_shape for pieces in wishes for piece in pieces}
        try:
            _check(folder, shapes)
            names = sorted(shapes, key=folder.order)
            answer = [{name: (shapes[name], folder.stored(name).dtype) for name in names}]
        except CapabilityError as error:
            # Sent as the answer that the other ranks wait for: all raise it.
            answer = [error]
    dist.broadcast_object_list(answer, src=0, group=group)
    if isinstance(answer[0], CapabilityError):
        raise answer[0]
    assert isinstance(answer[0], dict)
    return answer[0]


class _Sender:
    """Rank 0's side: prepares one block while the previous one is being sent."""

    def __init__(
        self,
        wishes: Sequence[Sequence[TensorShard]],
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        self._device, self._group = device, group
        self._wishes: dict[str, list[tuple[int, TensorShard]]] = {}
        for rank, pieces in enumerate(wishes):
            for piece in pieces if rank else ():
                self._wishes.setdefault(piece.tensor, []).append((rank, piece))
        self._under_way: list[dist.Work] = []
        self._sends: list[dist.P2POp] = []

    def block(
        self, name: str, first: int, end: int, rows: torch.Tensor, own: Sequence[_Box]
    ) -> None:
        """Copy and send the `rows` of a tensor."""
        # Once for all ranks: each is sent a part of it, from the device of the process group.
        rows = rows.to(self._device, non_blocking=True)
        for box in own:
            if part := _overlap(box.piece, first, end):
                low, high = part
                box.into[low:high].copy_(_columns(rows, box.piece, low, high, first))
        sends = [
            dist.P2POp(
                dist.isend,
                # As bytes: some dtypes of files cannot be sent.
                _columns(rows, piece, *part, first).contiguous().view(-1).view(torch.uint8),
                rank,
                self._group,
            )
            for rank, piece in self._wishes.get(name, ())
            if (part := _overlap(piece, first, end))
        ]
        self.finish()
        # Keep the tensors until completion: the transfer reads their memory.
        self._sends = sends
        self._under_way = dist.batch_isend_irecv(sends) if sends else []

    def finish(self) -> None:
        for work in self._under_way:
            work.wait()
        self._under_way, self._sends = [], []


def _overlap(piece: TensorShard, first: int, end: int) -> tuple[int, int] | None:
    """The rows of a box that overlap rows `first` to `end` of its tensor; None without overlap."""
    low, high = max(first - piece.offsets[0], 0), min(end - piece.offsets[0], piece.num_rows)
    return (low, high) if low < high else None


def _columns(
    rows: torch.Tensor, piece: TensorShard, low: int, high: int, first: int
) -> torch.Tensor:
    """Rows `low` to `high` of a box, from `rows`, which begin at row `first` of the tensor."""
    offsets = piece.offsets[0] + low - first, *piece.offsets[1:]
    return narrow(rows, offsets, (high - low, *piece.sizes[1:]))


def _receive_rows(
    box: _Box,
    first: int,
    end: int,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup,
) -> None:
    part = _overlap(box.piece, first, end)
    if not part:
        return
    into = box.into[slice(*part)]
    raw = torch.empty(into.numel() * dtype.itemsize, dtype=torch.uint8, device=device)
    # In a batch, as the sender's: NCCL runs a message outside of one in a communicator of two
    # ranks.
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, raw, 0, group)]):
        work.wait()
    into.copy_(raw.view(dtype).view(into.shape))


def _broadcast(tensor: torch.Tensor, group: dist.ProcessGroup, device: torch.device) -> None:
    if not tensor.numel():
        return
    # Only what is sent must be on the device of the process group.
    on_device = tensor.detach().to(device)
    dist.broadcast(on_device, group=group, group_src=0)
    if on_device.data_ptr() != tensor.data_ptr():
        tensor.copy_(on_device)
