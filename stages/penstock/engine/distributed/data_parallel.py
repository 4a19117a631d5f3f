"""Data parallelism: FSDP2 sharding, or replicated weights with gradient all-reduce (DDP)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from penstock.config.schema.train import TrainConfig
from penstock.core.errors import CapabilityError
from penstock.engine.device import uses_cuda
from penstock.engine.distributed.bucketed_all_reduce import BUCKET_MB, BucketedAllReduce
from penstock.engine.distributed.device_mesh import DATA_AXES, Mesh
from penstock.engine.distributed.expert_parallel import moe_layers
from penstock.engine.distributed.parallel_dims import ReshardAfter, reshard_policy
from penstock.engine.distributed.param_shards import LocalParam, TensorShard, make_local_param
from penstock.models.causal_lm import CausalLM
from penstock.models.decoder import Decoder, PipelineStageModules
from penstock.models.multi_token_prediction import PredictionLayer
from penstock.models.names import EMBEDDING_WEIGHT, HEAD_WEIGHT

HEAD_MAY_BE_SKIPPED = Version("2.13")
"""The first PyTorch whose FSDP2 completes a unit of several modules of which one is not called."""


class GradSync:
    """Gradient reduction over the passes of a step."""

    def prepare_backward(self, *, last: bool) -> None:
        """Called before each forward and backward pass; `last` marks the last one of the step."""

    def wait(self) -> None:
        """Called after the step's last backward pass; returns when all gradients are reduced."""


@dataclass(frozen=True)
class FSDPPolicy:
    """The FSDP2 settings."""

    reshard_after: ReshardAfter
    param_dtype: torch.dtype | None
    """The dtype of gathered weights and activations; None: the dtype of the weights."""
    reduce_dtype: torch.dtype | None
    """The dtype of gradient reduction; None: the compute dtype."""
    offload: bool
    prefetch: bool


def shard(
    model: nn.Module,
    units: list[nn.Module],
    mesh: DeviceMesh,
    policy: FSDPPolicy,
    *,
    first: nn.Module | None = None,
    last: Sequence[nn.Module] = (),
    exact: Sequence[nn.Module] = (),
    elsewhere: Sequence[tuple[nn.Module, DeviceMesh]] = (),
) -> None:
    """Shard parameters with FSDP2, unit by unit, in place.

    `mesh` replicates along `replicate` and shards along `shard` (HSDP). `first` is the unit before
    the others, and the modules `last`, of which the last need not be called, are the unit after
    them. The weights of `exact` modules are never cast; they are separate units if other weights
    are cast. `elsewhere` are modules with a mesh of their own.
    """
    mixed = MixedPrecisionPolicy(param_dtype=policy.param_dtype, reduce_dtype=policy.reduce_dtype)
    uncast = MixedPrecisionPolicy(reduce_dtype=policy.reduce_dtype)
    apart = [module for module in exact if policy.param_dtype is not None and module not in units]
    # Without replicas a one-dimensional mesh saves a collective per unit.
    mesh = mesh if mesh["replicate"].size() > 1 else mesh["shard"]
    # Pinning is CPUOffloadPolicy's default, and fails without CUDA.
    offload = CPUOffloadPolicy(pin_memory=uses_cuda()) if policy.offload else OffloadPolicy()
    frees = policy.reshard_after == "nothing"
    # Before the layers that contain them: a unit takes the parameters that no unit inside it has.
    for unit, its_mesh in elsewhere:
        settings = {"mesh": its_mesh["shard"], "mp_policy": mixed, "offload_policy": offload}
        fully_shard(unit, reshard_after_forward=frees, **settings)
    settings = {"mesh": mesh, "offload_policy": offload}
    for unit in [*apart, *units, *([first] if first else [])]:
        policy_of_unit = uncast if unit in exact else mixed
        fully_shard(unit, mp_policy=policy_of_unit, reshard_after_forward=frees, **settings)
    # The backward pass needs these first; resharding would only gather them a second time.
    for end in ([*last], model):
        if end:
            fully_shard(end, mp_policy=mixed, reshard_after_forward=False, **settings)
    if isinstance(first, FSDPModule) and len([*first.parameters()]) == 1:
        # The gradient of an embedding does not depend on its table, that of an adapter does.
        first.set_unshard_in_backward(False)
    fsdp_modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in fsdp_modules:
        # A divide factor of 1 with a forced sum is exact on NCCL and gloo, also on one rank.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    layers = _layers_with_units(model, fsdp_modules, skipped=last[1:])
    if policy.prefetch:
        # Not those that evaluations do not call.
        always = [layer for layer in layers if not isinstance(layer[0], PredictionLayer)]
        for layer, following in pairwise(always):
            # Not from units inside a layer: recomputed in the backward pass, they would gather a
            # layer whose backward pass has ended, and nothing would free it.
            layer[0].set_modules_to_forward_prefetch(following)
    if elsewhere:
        # FSDP2's own prefetch follows the order of the forward pass, which host syncs of expert
        # parallelism hold up: gather a whole layer while the one after it is computed.
        for before, layer in pairwise(layers):
            layer[0].set_modules_to_backward_prefetch(before)


def _layers_with_units(
    model: nn.Module, fsdp_modules: Sequence[FSDPModule], *, skipped: Sequence[nn.Module]
) -> list[list[FSDPModule]]:
    """The units that are in no other but the root, each with those inside it, in the order of the
    modules, which is that of execution; `basic_modules` need not be.
    """
    layers: list[list[FSDPModule]] = []
    inside: set[nn.Module] = {model}
    for unit in fsdp_modules:
        assert isinstance(unit, nn.Module)
        if unit not in inside:
            modules = [*unit.modules()]
            inside.update(modules)
            if unit not in skipped:
                layers.append([module for module in modules if isinstance(module, FSDPModule)])
    return layers


class FSDPSync(GradSync):
    """Gradient sync of FSDP2, which must be told which backward pass is the last.

    Gradients are reduce-scattered after every pass, so that this rank accumulates only its shard;
    with `once` after the last pass, and unsharded gradients of all layers accumulate until then.
    """

    def __init__(
        self, parts: Sequence[nn.Module], reshard_after: ReshardAfter, *, once: bool
    ) -> None:
        self._parts = [part for part in parts if isinstance(part, FSDPModule)]
        self._reshard_after, self._once = reshard_after, once

    def prepare_backward(self, *, last: bool) -> None:
        reduces = last or not self._once
        for part in self._parts:
            # Without a sync FSDP2 keeps unsharded gradients, and there is nothing to wait for.
            part.set_requires_gradient_sync(reduces)
            # Under HSDP: replicas are summed once, after the reduce-scatters of all passes.
            part.set_requires_all_reduce(last)
            part.set_is_last_backward(reduces)
            part.set_reshard_after_backward(last or self._reshard_after != "step")


class ReplicatedSync(GradSync):
    """Gradient sync of replicated weights: all-reduce over the ranks that share them."""

    def __init__(self, sums: Sequence[BucketedAllReduce]) -> None:
        self._sums = sums

    def prepare_backward(self, *, last: bool) -> None:
        for sums in self._sums if last else ():
            sums.start()

    def wait(self) -> None:
        for sums in self._sums:
            sums.wait()


def shard_parts(
    parts: Iterable[CausalLM], mesh: Mesh, train: TrainConfig, basic_modules: list[str]
) -> None:
    """Shard each part under `fsdp2`; do nothing in the other modes. Raises CapabilityError for a
    name in `basic_modules` that matches no module."""
    if train.data_parallel_mode != "fsdp2":
        return
    computes_in: torch.dtype = getattr(torch, train.computes_in)
    policy = FSDPPolicy(
        reshard_after=reshard_policy(train),
        param_dtype=None if computes_in == torch.float32 else computes_in,
        reduce_dtype=torch.bfloat16 if train.fsdp_reduce_dtype == "bf16" else torch.float32,
        offload=train.enable_fsdp_offload,
        prefetch=train.enable_forward_prefetch,
    )
    for part in parts:
        if mesh.shards_experts_separately and isinstance(part, Decoder) and part.config.experts:
            # Created now because all ranks must create groups, and a stage may have no experts.
            mesh.expert_mesh()
        embedding, head = edge_units(part)
        shard(
            part,
            shard_units(part, basic_modules),
            mesh.fsdp_mesh(train.cp_fsdp_mode),
            policy,
            first=embedding,
            last=head,
            exact=part.fp32_modules(),
            elsewhere=[
                (experts, mesh.expert_mesh()) for experts in separately_sharded_experts(part, mesh)
            ],
        )


def separately_sharded_experts(part: CausalLM, mesh: Mesh) -> list[nn.Module]:
    """The experts of a part's layers if expert parallelism shards them over another mesh."""
    if not mesh.shards_experts_separately or not isinstance(part, Decoder):
        return []
    return [mixture.experts for mixture in moe_layers(part)]


def gradient_sync(
    train: TrainConfig, mesh: Mesh, parts: Sequence[CausalLM], params: Sequence[LocalParam]
) -> GradSync:
    """Return the gradient sync over the ranks that compute other tokens."""
    if train.data_parallel_mode == "fsdp2":
        once = train.resolved_gradient_sync == "step"
        return FSDPSync(parts, reshard_policy(train), once=once)
    # Reentrant checkpointing runs a backward pass within the backward pass.
    overlaps = not train.enable_reentrant and mesh.size("pipeline") == 1
    bucket_mb = train.comm_bucket_mb or BUCKET_MB
    # Experts may have other replicas than the other weights have.
    by_group: dict[dist.ProcessGroup, list[nn.Parameter]] = {}
    for param in params:
        if param.replica_group is not None:
            by_group.setdefault(param.replica_group, []).append(param.parameter)
    return ReplicatedSync(
        [
            BucketedAllReduce(parameters, group, overlaps=overlaps, bucket_mb=bucket_mb)
            for group, parameters in by_group.items()
        ]
    )


def shard_units(model: CausalLM, basic_modules: list[str]) -> list[nn.Module]:
    """The FSDP units: modules that `basic_modules` names inside layers, then the layers.

    A name is the last part of a module's name (`mlp`) or its class (`FeedForward`). `edge_units`
    decides about the embedding, the final norm and the head. Raises CapabilityError for a name
    without a match, also in other parts of the model.
    """
    edges = {module for module in model.edges if module is not None}
    units: list[nn.Module] = []
    for unit in basic_modules:
        named_modules = _called(unit, model)
        if not named_modules:
            config, outline = model.config, None
            if isinstance(model, Decoder):
                # One layer of each kind: this part may lack a kind that another has.
                sparse = config.experts.layers[:1] if config.experts else ()
                with torch.device("meta"):
                    outline = Decoder(config, part=PipelineStageModules([0, *sparse]))
            if outline is None or not _called(unit, outline):
                raise CapabilityError(
                    f"model.basic_modules names {unit}, and no module is called so."
                )
        # Inner units first: `fully_shard` leaves parameters to the unit that has them already.
        units += [module for module in named_modules if module not in edges]
    tower = model.vision.blocks if isinstance(model, Decoder) and model.vision else []
    return [*units, *(layer for layer in (*tower, *model.blocks) if layer not in units)]


def edge_units(model: CausalLM) -> tuple[nn.Module | None, list[nn.Module]]:
    """The embedding, and the final norm with the head: FSDP units of their own, if not tied and
    called once; otherwise they are in the root unit.

    A loss that computes logits in chunks reads the head's weight without calling the head, for
    which its unit needs PyTorch 2.13: in an earlier version both stay in the root unit.
    """
    embedding, norm, head = model.edges
    called_again = isinstance(model, Decoder) and model.config.num_mtp_layers
    if model.is_tied or called_again or Version(torch.__version__) < HEAD_MAY_BE_SKIPPED:
        return None, []
    return embedding, [module for module in (norm, head) if module is not None]


def _called(unit: str, model: CausalLM) -> list[nn.Module]:
    return [
        module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == unit or type(module).__name__ == unit
    ]


def local_params(
    parts: Sequence[CausalLM],
    shards: Sequence[Mapping[str, tuple[TensorShard, ...]]],
    mesh: Mesh,
    train: TrainConfig,
) -> list[LocalParam]:
    """Every parameter of the parts as sharded now, with the checkpoint tensors it is part of."""
    # The ranks that hold the same part of most weights as this one, and of the experts.
    if train.data_parallel_mode == "fsdp2":
        replicate = mesh.fsdp_mesh(train.cp_fsdp_mode)["replicate"]
        copying = replicate.get_group() if replicate.size() > 1 else None
    else:
        copying = mesh.group(*DATA_AXES)
    copying_experts = None
    if train.data_parallel_mode != "fsdp2" and mesh.shards_experts_separately:
        alike = mesh.expert_mesh()["shard"]
        copying_experts = alike.get_group() if alike.size() > 1 else None
    params: list[LocalParam] = []
    for part, shards_by_name in zip(parts, shards, strict=True):
        expert_params = {
            id(p)
            for experts in separately_sharded_experts(part, mesh)
            for p in experts.parameters()
        }
        for name, parameter in part.named_parameters():
            shards_of_param = shards_by_name[name]
            # A head that is a copy of the tied embedding is treated as the embedding, also by name.
            is_copy = (
                name == HEAD_WEIGHT and shards_of_param[0].tensor == part.config.names.embedding
            )
            group = copying_experts if id(parameter) in expert_params else copying
            model_name = EMBEDDING_WEIGHT if is_copy else name
            params.append(
                make_local_param(model_name, parameter, shards_of_param, replica_group=group)
            )
    return params
