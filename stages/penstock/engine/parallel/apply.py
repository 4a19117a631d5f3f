"""What the settings say of one model over a mesh, in the words of the files beside this one."""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from penstock.config.train import TrainConfig
from penstock.core.errors import CapabilityError
from penstock.engine.parallel.data import GradientSync, Sharded, Sharding, Whole, shard
from penstock.engine.parallel.expert import mixtures
from penstock.engine.parallel.mesh import ROWS, Mesh
from penstock.engine.parallel.pieces import Held, Piece, hold
from penstock.engine.parallel.replicas import BUCKET_MB, GradientSums
from penstock.engine.parallel.zero import kept
from penstock.models.decoder import Decoder, Part
from penstock.models.names import EMBEDDING_WEIGHT, HEAD_WEIGHT
from penstock.models.shape import DecoderConfig


def shard_parts(
    parts: Iterable[Decoder], mesh: Mesh, train: TrainConfig, basic_modules: list[str]
) -> None:
    """Shard each part under `fsdp2`; under the other modes do nothing.

    Raises CapabilityError for a name in `basic_modules` that is no module's.
    """
    if train.data_parallel_mode != "fsdp2":
        return
    for part in parts:
        units = shard_units(part, basic_modules)
        exact = [router for router in part.routers().values() if router.is_exact]
        shard(
            part,
            units,
            mesh.weights(train.cp_fsdp_mode),
            sharding(train),
            exact=exact,
            elsewhere=[(experts, mesh.experts()) for experts in experts_apart(part, mesh)],
        )


def experts_apart(part: Decoder, mesh: Mesh) -> list[nn.Module]:
    """The experts of a part's layers, where they lie otherwise than other weights."""
    if not mesh.parts_experts:
        return []
    return [mixture.experts for mixture in mixtures(part)]


def sharding(train: TrainConfig) -> Sharding:
    """What the settings say of weights that are sharded."""
    computes_in: torch.dtype = getattr(torch, train.computes_in)
    return Sharding(
        kept=kept(train),
        compute=None if computes_in == torch.float32 else computes_in,
        reduce=torch.bfloat16 if train.fsdp_reduce_dtype == "bf16" else torch.float32,
        offload=train.enable_fsdp_offload,
        prefetch=train.enable_forward_prefetch,
    )


def gradient_sync(
    train: TrainConfig, mesh: Mesh, parts: Sequence[Decoder], held: Sequence[Held]
) -> GradientSync:
    """Who sums gradients over the ranks that compute other tokens."""
    if train.data_parallel_mode == "fsdp2":
        return Sharded(parts, kept(train))
    # The reentrant kind of recomputation is a backward pass within the backward pass.
    overlaps = not train.enable_reentrant and mesh.size("pipeline") == 1
    bucket_mb = train.comm_bucket_mb or BUCKET_MB
    by_copies: dict[int, list[Held]] = {}
    for one in held:
        by_copies.setdefault(id(one.copying), []).append(one)
    return Whole(
        [
            GradientSums(
                [one.parameter for one in some],
                some[0].copying,
                overlaps=overlaps,
                bucket_mb=bucket_mb,
            )
            for some in by_copies.values()
            if some[0].copying is not None
        ]
    )


def shard_units(model: Decoder, basic_modules: list[str]) -> list[nn.Module]:
    """The modules that are gathered one at a time: what the user named inside layers, then layers.

    A name is a module's last name (`mlp`) or its class (`FeedForward`). Raises CapabilityError for
    one that is nowhere, also in other parts of the model.
    """
    units: list[nn.Module] = []
    for wanted in basic_modules:
        found = _called(wanted, model)
        if not found and not _called(wanted, _outline(model.config)):
            raise CapabilityError(
                f"model.basic_modules names {wanted}, and no module is called so."
            )
        units += found
    return [*units, *(layer for layer in model.model.layers.values() if layer not in units)]


def _called(wanted: str, model: Decoder) -> list[nn.Module]:
    return [
        module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == wanted or type(module).__name__ == wanted
    ]


def _outline(config: DecoderConfig) -> Decoder:
    """A model with a layer of each kind: what every part of it may be called."""
    sparse = config.experts.layers[:1] if config.experts else ()
    with torch.device("meta"):
        return Decoder(config, part=Part([0, *sparse]))


def held_in(
    parts: Sequence[Decoder],
    pieces: Sequence[Mapping[str, tuple[Piece, ...]]],
    mesh: Mesh,
    train: TrainConfig,
) -> list[Held]:
    """Every parameter of the parts as it lies now, and which pieces of which tensors it is."""
    copying, of_experts = _copying(mesh, train), _copying_experts(mesh, train)
    found: list[Held] = []
    for part, pieces_here in zip(parts, pieces, strict=True):
        apart = {id(p) for experts in experts_apart(part, mesh) for p in experts.parameters()}
        for name, parameter in part.named_parameters():
            its = pieces_here[name]
            # A head that is a copy of the embedding is treated like it, also by its name.
            is_copy = name == HEAD_WEIGHT and its[0].tensor == part.config.names.embedding
            called = EMBEDDING_WEIGHT if is_copy else name
            group = of_experts if id(parameter) in apart else copying
            found.append(hold(called, parameter, its, copying=group))
    return found


def _copying(mesh: Mesh, train: TrainConfig) -> dist.ProcessGroup | None:
    """The ranks that hold the very same of most weights as this one; None where it alone does."""
    if train.data_parallel_mode != "fsdp2":
        return mesh.group(*ROWS)
    replicate = mesh.weights(train.cp_fsdp_mode)["replicate"]
    return replicate.get_group() if replicate.size() > 1 else None


def _copying_experts(mesh: Mesh, train: TrainConfig) -> dist.ProcessGroup | None:
    """The same of experts."""
    if train.data_parallel_mode == "fsdp2" or not mesh.parts_experts:
        return None
    alike = mesh.experts()["shard"]
    return alike.get_group() if alike.size() > 1 else None
