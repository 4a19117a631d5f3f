"""Model pool (multi-LoRA): the models trained on one base model, one loaded at a time.

Models that share the base have an adapter each: its tensors, accumulated gradients and optimizer
are kept here while another one is loaded. With full fine-tuning there is only one model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from pydantic import ValidationError

from penstock.adapters.lora import LoraLinear
from penstock.adapters.lora_embedding import LoraEmbedding
from penstock.adapters.lora_experts import ExpertAdapter
from penstock.adapters.match_targets import HEAD
from penstock.adapters.names import parse_lora_name
from penstock.adapters.scaling import lora_scaling
from penstock.config.rules.optimizer import check_optimizer_kwargs
from penstock.config.schema.run import RunConfig
from penstock.config.schema.train import TrainConfig
from penstock.core.errors import CapabilityError, ConfigError
from penstock.engine.distributed.param_shards import LocalParam, local
from penstock.engine.hf.load_weights import copy_shard
from penstock.engine.multi_lora.rank_padding import padded_lora_init
from penstock.engine.multi_lora.shared_base import SharedBase
from penstock.engine.optim.build import build_distributed_optimizer
from penstock.engine.optim.norm_metrics import Norms, norms_by_type
from penstock.models.names import LINEAR_ATTN, SELF_ATTN

Kind = Literal["attn", "mlp", "unembed"]
# Kinds of layers, by which clients choose what is trained.
KINDS: tuple[Kind, ...] = ("attn", "mlp", "unembed")

Per = Literal["sum", "token"]
"""What accumulated gradients belong to: the sum of losses, or a sum to divide by the tokens."""


# The key in an optimizer group for whether it has weight decay.
DECAYS = "decays"

# Hyperparameters that every step brings.
STEP_HYPERPARAMETERS = ("betas", "eps")


class UnknownModelError(ConfigError):
    """No model of this name is open."""


@dataclass(frozen=True)
class LoraSpec:
    """The settings of one model's adapter."""

    rank: int
    alpha: float
    seed: int
    kinds: frozenset[Kind]
    """The trained kinds of layers. Layers of no kind, such as an embedding, are always trained."""

    @property
    def scale(self) -> float:
        return lora_scaling(self.rank, self.alpha, "rank")

    def adapts(self, layer: str) -> bool:
        """Whether the adapter of a layer is trained; takes model or checkpoint names."""
        return (kind := layer_kind(layer)) is None or kind in self.kinds

    def trains(self, local_param: LocalParam) -> bool:
        factor = parse_lora_name(local_param.name)
        assert factor is not None, f"{local_param.name} is no part of an adapter"
        return self.adapts(factor.module)


@dataclass
class TenantModel:
    """One model."""

    name: str
    adapter: LoraSpec | None
    """None: full fine-tuning."""
    run: RunConfig
    trained: Sequence[LocalParam]
    """The parameters that its optimizer steps, on this rank."""
    optimizer: torch.optim.Optimizer
    norms: Norms | None = None
    """Gradient norms; None if the config asks for none."""
    weights: Sequence[torch.Tensor] | None = None
    """This rank's shards of its tensors while it is unloaded; None while it is loaded."""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    """Accumulated gradients since the last step, by parameter name, sharded like the parameters."""
    per: Per | None = None
    tokens: int = 0
    step: int = 0

    def zero_grad(self) -> None:
        self.gradients, self.per, self.tokens = {}, None, 0


class ModelPool:
    """All open models. Every rank makes the same calls."""

    def __init__(self, substrate: SharedBase) -> None:
        self.substrate = substrate
        self._all: dict[str, TenantModel] = {}
        self._active: TenantModel | None = None
        self.guest: object = None
        """The caller's identifier of loaded weights that belong to no model; None: unknown."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._all)

    @property
    def kinds(self) -> frozenset[Kind]:
        return frozenset(kind for kind in map(layer_kind, self.substrate.adapted) if kind)

    def get(self, name: str) -> TenantModel:
        """The model of this name. Raises UnknownModelError if there is none."""
        if name not in self._all:
            raise UnknownModelError(f"the workers have no model {name}.\n  Create it, or load it.")
        return self._all[name]

    def open(
        self, name: str, adapter: LoraSpec | None, optimizer: Mapping[str, Any]
    ) -> TenantModel:
        """Open a new model and load it. `optimizer` are settings of the train section. Raises
        ConfigError if the name is taken, the adapter or the settings are invalid, or another model
        uses full fine-tuning."""
        self._require_room(name)
        run = override_optimizer(self.substrate.run, optimizer)
        trainable = self.substrate.trainable
        if adapter is None:
            trained = trainable
        else:
            self._require_possible(adapter)
            trained = [param for param in trainable if adapter.trains(param)]
        tenant = TenantModel(
            name,
            adapter,
            run,
            trained,
            optimizer_for(run, trained, self.substrate),
            norms_by_type(run.train, trained, self.substrate.ranks),
        )
        self.deactivate()
        if self.substrate.sharing == "alone":
            self.reset_weights(tenant)
        elif adapter:
            tenant.weights = self._init_adapter(adapter)
        self._all[name] = tenant
        return self.activate(name)

    def close(self, name: str) -> None:
        """Remove a model. Raises UnknownModelError if there is none of this name."""
        resident = self.get(name)
        del self._all[name]
        if self._active is resident:
            self._active = None

    def activate(self, name: str) -> TenantModel:
        """Load this model into the base. Raises UnknownModelError if there is none of this name."""
        resident = self.get(name)
        if self._active is resident:
            return resident
        self.deactivate()
        if resident.weights is not None:
            self.substrate.load_params(self._model_params, resident.weights)
            # Loaded, the tensors of the base are the only copy.
            resident.weights = None
        if resident.adapter:
            self._set_scale(resident.adapter.scale)
        self._active = resident
        return resident

    def deactivate(self) -> None:
        """Unload the current model; the weights in the base are undefined afterwards."""
        if self._active:
            # Full weights go to the CPU: there may be no memory for a second copy on the device.
            device = None if self.substrate.sharing == "adapters" else torch.device("cpu")
            self._active.weights = self.substrate.copy_params(self._model_params, device)
        self._active = self.guest = None

    def accumulate_grads(self, resident: TenantModel, tokens: int, per: Per) -> None:
        """Accumulate the gradients that a pass of so many trained tokens left in the parameters."""
        for param in self.substrate.trainable:
            # Taken without a copy: the next pass allocates its own.
            gradient, param.parameter.grad = param.parameter.grad, None
            if gradient is None or (resident.adapter and not resident.adapter.trains(param)):
                continue
            if param.name in resident.gradients:
                local(resident.gradients[param.name]).add_(local(gradient))
            else:
                resident.gradients[param.name] = gradient
        resident.tokens += tokens
        resident.per = per

    def grad_norms(self, resident: TenantModel) -> dict[str, float]:
        """Norms of the accumulated gradients by layer type, if the config asks for them, divided as
        a step now would divide the gradients. Collective."""
        if resident.norms is None:
            return {}
        norm = resident.norms.of(lambda param: resident.gradients.get(param.name))
        over = max(1, resident.tokens) if resident.per == "token" else 1
        by_type = resident.norms.by_name(norm)
        return {f"grad_norm/{kind}:max": value / over for kind, value in by_type.items()}

    def zero_grad(self) -> None:
        """Clear the gradients of the parameters, such as those of a failed pass."""
        for param in self.substrate.trainable:
            param.parameter.grad = None

    def with_alpha(self, adapter: LoraSpec, alpha: float) -> LoraSpec:
        """The adapter spec with another alpha. Raises CapabilityError if compiled graphs need
        another scaling."""
        scaled = replace(adapter, alpha=alpha)
        self._require_compiled(scaled)
        return scaled

    def set_adapter_spec(self, resident: TenantModel, adapter: LoraSpec) -> None:
        """Set the adapter spec of the loaded model, with tensors of the same shapes."""
        resident.adapter = adapter
        self._set_scale(adapter.scale)

    def reset_weights(self, resident: TenantModel) -> None:
        """Reset a full model to its initial weights."""
        self.substrate.reset_to_base()
        if resident.adapter:
            self.substrate.load_params(
                self.substrate.trainable, self._init_adapter(resident.adapter)
            )
        resident.zero_grad()
        resident.step = 0
        self.reset_optimizer(resident)

    def reset_optimizer(self, resident: TenantModel) -> None:
        resident.optimizer = optimizer_for(resident.run, resident.trained, self.substrate)

    def load_base(self) -> None:
        self.deactivate()
        factors = self.substrate.factors
        # Whatever the scale is now, products of zeros add nothing to the base.
        zeros = [torch.zeros_like(local(factor.parameter.detach())) for factor in factors]
        self.substrate.load_params(factors, zeros)

    def load_adapter(self, weights: Sequence[torch.Tensor], scale: float) -> None:
        """Load these adapter tensors, which belong to no model."""
        self.deactivate()
        self.substrate.load_params(self.substrate.trainable, weights)
        self._set_scale(scale)

    @property
    def _model_params(self) -> Sequence[LocalParam]:
        """The parameters that differ between models."""
        shared = self.substrate.sharing == "adapters"
        return self.substrate.trainable if shared else self.substrate.params

    def _init_adapter(self, adapter: LoraSpec) -> list[torch.Tensor]:
        weights: list[torch.Tensor] = []
        for param in self.substrate.trainable:
            shard = torch.zeros_like(local(param.parameter.detach()))
            for piece in param.shards:
                start = padded_lora_init(piece.tensor, piece.full_shape, adapter.rank, adapter.seed)
                copy_shard(start, piece, piece.view(shard))
            weights.append(shard)
        return weights

    def _set_scale(self, scale: float) -> None:
        for part in self.substrate.built.engine.model.parts:
            for module in part.modules():
                if isinstance(module, (LoraLinear, LoraEmbedding, ExpertAdapter)):
                    # Read in each call, except by compiled graphs (`_require_compiled`).
                    module.scale = scale

    def _require_room(self, name: str) -> None:
        if name in self._all:
            raise ConfigError(f"model {name} is open already.\n  Give the new one another name.")
        if self._all and self.substrate.sharing == "alone":
            [occupant] = self._all
            why = (
                "lora.merge_lora_interval merges adapters into the base"
                if self.substrate.run.lora.enable_lora
                else "enable_lora is false, so all weights are trained"
            )
            raise ConfigError(
                f"{occupant} has all of the base: {why}, and one model at a time is trained then.\n"
                f"  Unload {occupant} first, or serve with enable_lora and no merge_lora_interval."
            )

    def _require_possible(self, adapter: LoraSpec) -> None:
        lora, adapted = self.substrate.run.lora, self.substrate.adapted
        max_rank = lora.lora_rank
        if not 1 <= adapter.rank <= max_rank:
            raise ConfigError(
                f"the rank is {adapter.rank}, and this server has room for 1 to {max_rank} "
                "(lora_rank).\n  Ask for another rank, or serve with a greater lora_rank."
            )
        if self.substrate.sharing == "alone" and adapter.rank != max_rank:
            raise ConfigError(
                f"the rank is {adapter.rank}, and where adapters are merged while they are trained "
                f"(merge_lora_interval) it is lora_rank, {max_rank}.\n  Ask for rank {max_rank}."
            )
        served_kinds = self.kinds
        for kind in KINDS:
            if kind in adapter.kinds and kind not in served_kinds:
                raise ConfigError(
                    f"train_{kind} is true, and {_KIND_NAMES[kind]} has no adapter here: "
                    "lora_target_modules is "
                    f"{', '.join(map(str, lora.lora_target_modules or ()))}.\n"
                    f"  Ask with train_{kind}=False."
                )
        if not any(map(adapter.adapts, adapted)):
            raise ConfigError("nothing would be trained.\n  Leave one of train_* true.")
        is_trained = any(map(adapter.trains, self.substrate.trainable))
        if self.substrate.ranks.any_rank(not is_trained):
            raise CapabilityError(
                "a stage of the pipeline would have nothing to train.\n"
                "  Train layers of all kinds, or serve without pipeline_parallel_size."
            )
        self._require_compiled(adapter)

    def _require_compiled(self, adapter: LoraSpec) -> None:
        lora = self.substrate.run.lora
        fixed = lora_scaling(lora.lora_rank, lora.lora_alpha, "rank")
        if self.substrate.run.train.enable_compile and adapter.scale != fixed:
            raise CapabilityError(
                f"alpha / rank is {adapter.scale:g}, and the server's programs are compiled for "
                f"{fixed:g} (lora_alpha / lora_rank).\n  Ask for alpha {fixed * adapter.rank:g}, "
                "or serve without enable_compile."
            )


_KIND_NAMES: Mapping[Kind, str] = {
    "attn": "no layer of attention",
    "mlp": "no feed-forward layer",
    "unembed": "the unembedding",
}


def layer_kind(layer: str) -> Kind | None:
    """The kind of a layer, by its model or checkpoint name."""
    if layer == HEAD:
        return "unembed"
    if any(f".{module}." in layer for module in (SELF_ATTN, LINEAR_ATTN, "conv", "mamba")):
        return "attn"
    networks = ".mlp", ".block_sparse_moe", ".feed_forward", ".shared_mlp"
    return "mlp" if any(module in layer for module in networks) else None


def optimizer_for(
    run: RunConfig, trained: Sequence[LocalParam], substrate: SharedBase
) -> torch.optim.Optimizer:
    """A new optimizer without state. Collective."""
    # Any weight decay: it only marks the groups with decay, and each step brings its own value.
    train = run.train.model_copy(update={"weight_decay": 1.0})
    run = run.model_copy(update={"train": train})
    optimizer = build_distributed_optimizer(
        run, trained, substrate.family.roles, substrate.built.config, substrate.ranks
    )
    for group in optimizer.param_groups:
        group[DECAYS] = bool(group["weight_decay"])
    return optimizer


def override_optimizer(run: RunConfig, optimizer: Mapping[str, Any]) -> RunConfig:
    """The run with these settings of the train section. Raises ConfigError if no optimizer has
    them, or if the optimizer cannot train an adapter."""
    if not optimizer:
        return run
    for name in STEP_HYPERPARAMETERS:
        if name in optimizer.get("optimizer_kwargs", {}):
            raise ConfigError(f"{name} is sent with each step.\n  Leave it out of kwargs.")
    # Without defaults, which may be others for the client's optimizer.
    written = run.train.model_dump(exclude_unset=True)
    try:
        train = TrainConfig.model_validate({**written, **optimizer})
    except ValidationError as error:
        [first, *_] = error.errors()
        field = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"no optimizer here can be {dict(optimizer)}: {field}: {first['msg']}.\n"
            "  Leave optimizer_config out for the server's own."
        ) from None
    if train.optimizer == "muon" and run.lora.enable_lora:
        raise ConfigError(
            "Muon updates matrices of hidden layers, and a model with an adapter trains none of "
            "those: what it trains would be AdamW's.\n  Ask for adamw."
        )
    overridden = run.model_copy(update={"train": train})
    for fault in check_optimizer_kwargs(overridden):
        raise ConfigError(f"optimizer_config: {fault.path[-1]}: {fault.text}.")
    return overridden
