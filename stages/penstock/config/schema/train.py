"""The section `train`: objective, loss, batch sizes, dropout and load balancing of experts."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from penstock.config.schema.base import ConfigSection
from penstock.config.schema.cache_key import Keyed, KeyedByContent, KeyedUnlessDefault, Unkeyed
from penstock.config.schema.checkpoint import CheckpointConfig
from penstock.config.schema.duration import BudgetConfig
from penstock.config.schema.effect import OWN_EXPERTS, TRAINS, NativeOnly, NotWith, OnlyWith
from penstock.config.schema.evaluation import EvaluationConfig
from penstock.config.schema.fp8 import Fp8TrainingConfig
from penstock.config.schema.logging import LoggingConfig
from penstock.config.schema.memory import MemoryConfig
from penstock.config.schema.optimizer import OptimConfig
from penstock.config.schema.parallelism import ParallelConfig
from penstock.config.schema.registered import Registered
from penstock.config.schema.served import Served
from penstock.core.extensions import LOSSES


def _not_with(setting: str, why: str, **matched: tuple[Any, ...]) -> NotWith:
    return NotWith(
        setting,
        why=f"cannot be used with {setting}: {why}",
        instead="or leave {field} out",
        **matched,
    )


def _eager_only(setting: str, instead: str, **matched: tuple[Any, ...]) -> NotWith:
    return NotWith(
        setting,
        why=f"needs eager attention over complete samples on one rank, without {setting}",
        instead=f"write {setting}: {instead}, or leave attention out",
        **matched,
    )


def _not_auto(setting: str, why: str, instead: str, **matched: tuple[Any, ...]) -> NotWith:
    return NotWith(
        setting,
        of=(AUTO,),
        why=f"auto {why}",
        instead=f"{instead}, or a number in place of auto",
        **matched,
    )


# Upper limit of batch sizes, in packed sequences.
MOST_ROWS = 10_000_000

AUTO = "auto"


class BalanceConfig(ConfigSection):
    """Load balancing of experts: losses of the router. `loss` in the metrics is without them."""

    conditions: ClassVar[tuple[OnlyWith, ...]] = (TRAINS,)

    moe_aux_loss_coef: KeyedUnlessDefault[float | None] = Field(default=None, ge=0)
    """Mixture of experts: coefficient of the auxiliary load-balancing loss. Unset: the model's own
    `router_aux_loss_coef` if its config.json, or `model.foundation`, has `output_router_logits:
    true`, otherwise 0, as in transformers."""

    moe_global_load_balancing: KeyedUnlessDefault[bool] = False
    """Global-batch load balancing: compute the load-balancing loss over all tokens of a step, on
    all ranks and in all micro-batches, so that single sequences may prefer some experts; false
    computes it for each packed sequence. With several micro-batches on a rank, a step costs a
    second forward pass."""

    moe_z_loss_coef: KeyedUnlessDefault[float] = Field(default=0.0, ge=0)
    """Mixture of experts: coefficient of the router z-loss, the mean over tokens and layers of
    logsumexp(router logits)^2, which keeps router logits small. 1e-3 is a common value."""

    moe_bias_update_rate: Annotated[
        KeyedUnlessDefault[float],
        NotWith(
            "lora.enable_lora",
            why="changes biases of the model itself, and with enable_lora: true only adapters are"
            " saved",
            instead="leave {field} out, or write lora.enable_lora: false",
        ),
        NotWith(
            "model.freeze_router", why="changes biases of routers, and {name}: true freezes routers"
        ),
        OWN_EXPERTS,
    ] = Field(default=0.0, ge=0)
    """Auxiliary-loss-free load balancing, for models with a bias in the choice of experts (ERNIE
    4.5, GLM-4.5): after each step, raise the biases of experts that got fewer tokens than the mean
    by this value and lower the others. 1e-3 is a common value; 0 does not change them."""


class BatchConfig(ConfigSection):
    """Batch sizes."""

    micro_batch_size: Annotated[
        KeyedByContent[Annotated[int, Field(gt=0, le=MOST_ROWS)] | Literal["auto"]],
        _not_auto(
            "train.global_batch_size",
            "divides the sequences of a step, whose number is not written",
            "write global_batch_size, such as 32",
            values=(None,),
        ),
        _not_auto(
            "train.gradient_accumulation_steps",
            "chooses the number of micro-batches too, and {name} is {value}",
            "leave {name} out",
            unless=(1,),
        ),
        _not_auto(
            "train.pipeline_parallel_size",
            "takes as few micro-batches as fit, and a pipeline of {value} ranks waits less with"
            " many",
            "write 1",
            unless=(1,),
        ),
        _not_auto(
            "train.fuse_optimizer_step",
            "may need several micro-batches, whose gradients are accumulated first",
            "leave {name} out",
        ),
    ] = 1
    """Packed sequences of one forward and backward pass of a rank. `auto`: as many as fit in memory
    by the estimate of `penstock plan` and divide `global_batch_size` evenly; the result is the same
    as with any number. Half as many if memory runs out: the ranks of one node are then started
    again from the newest checkpoint. Of a model whose memory is not estimated, such as one trained
    on images, 1."""

    gradient_accumulation_steps: KeyedByContent[int] = Field(default=1, gt=0, le=MOST_ROWS)
    """Micro-batches of a rank whose gradients are added before an optimizer step. With
    `global_batch_size`, 1 means that their number follows from it; any other value must agree with
    it."""

    global_batch_size: KeyedByContent[int | None] = Field(default=None, gt=0, le=MOST_ROWS)
    """Packed sequences of one optimizer step over all ranks. Unset: `micro_batch_size` times
    `gradient_accumulation_steps` times the number of data-parallel ranks. If it is set, the result
    of a run does not depend on the number of ranks."""

    seed: Annotated[
        Keyed[int],
        Served(
            doc="Random seed of initial weights: those of adapters whose clients give no seed, and "
            "those of a base model without weights to load. Generations without a seed are "
            "different each time."
        ),
    ] = Field(default=42, ge=0, lt=1 << 63)
    """Random seed of shuffling, initial weights and dropout."""

    @property
    def rows_at_once(self) -> int:
        """`micro_batch_size`; 1 for `auto` that was not chosen yet, which suits every layout that
        another number suits."""
        return 1 if self.micro_batch_size == AUTO else self.micro_batch_size


DROPS = OnlyWith("train.dropout.is_on", words="hidden, attention or ffn", why="there is no dropout")


class DropoutConfig(ConfigSection):
    """Dropout probabilities. The mask depends on `train.seed`, the step and the token, never on the
    parallel layout. Evaluations use no dropout."""

    conditions: ClassVar[tuple[OnlyWith, ...]] = (TRAINS,)

    hidden: float = Field(default=0.0, ge=0, lt=1)
    """Residual dropout: on the outputs of each layer's attention and feed-forward network, before
    they are added to the hidden states."""

    ffn: float = Field(default=0.0, ge=0, lt=1)
    """Dropout within each layer's feed-forward network, before its last matrix (down projection).
    For models without experts."""

    attention: Annotated[
        float,
        _eager_only("train.ringattn_parallel_size", "1", unless=(1,)),
        _eager_only("train.ulysses_parallel_size", "1", unless=(1,)),
        _eager_only("train.enable_compile", "false"),
        _eager_only("model.attention_cast_bf16", "false"),
        _eager_only("model.attn_implementation", "eager", unless=(None, "eager")),
    ] = Field(default=0.0, ge=0, lt=1)
    """Attention dropout: on the attention weights. These must be materialized, so attention is
    `eager`, and its memory grows with the square of a sample's length."""

    warmup_steps: Annotated[int, DROPS] = Field(default=0, ge=0)
    """Optimizer steps over which the probabilities rise linearly from 0 in the first step to their
    values. 0: no warmup."""

    depth_scaling: Annotated[bool, DROPS] = False
    """Use less dropout in earlier layers: layer l of L, from 0, uses l / L of the probabilities."""

    @property
    def is_on(self) -> bool:
        return bool(self.hidden or self.ffn or self.attention)


TOKEN_LOSS = OnlyWith(
    "train.objective",
    ("sft", "pretrain"),
    why="is a term of the token loss, and train.{name} is {value}",
)


OF_CROSS_ENTROPY = OnlyWith(
    "train.loss", ("cross_entropy",), why="is a term of cross-entropy, and {name} is {value}"
)


class LossConfig(ConfigSection):
    """The loss. Validation always reports plain cross-entropy of tokens."""

    objective: KeyedByContent[Literal["sft", "pretrain", "preference"]] = "sft"
    """Training objective. `sft`: cross-entropy of the tokens that the data marks as trained, such
    as completions. `pretrain`: cross-entropy of all tokens of plain text (data of type `text`).
    `preference`: DPO and similar losses on pairs of completions (section `preference`)."""

    loss: Annotated[
        KeyedUnlessDefault[Annotated[Literal["cross_entropy"] | str, Registered(LOSSES)]],
        TOKEN_LOSS,
        TRAINS,
    ] = "cross_entropy"
    """Loss of each trained token: `cross_entropy`, or one of an installed package."""

    loss_kwargs: Annotated[KeyedByContent[dict[str, Any]], TOKEN_LOSS, TRAINS] = Field(
        default_factory=dict[str, Any]
    )
    """Options of a `loss` of an installed package."""

    ce_mode: Annotated[
        Unkeyed[Literal["eager", "compiled", "chunked"]],
        NotWith(
            "train.loss",
            unless=("cross_entropy",),
            of=("compiled",),
            why="compiles cross-entropy, and loss is {value}",
            instead="leave {field} out",
        ),
        Served(
            documented="compiled",
            doc="Implementation of the LM head and the cross-entropy, as `train.ce_mode` of a run. "
            "If it is not written: `chunked`, which gives the same without a compiler.",
        ),
    ] = "chunked"
    """Implementation of the LM head and the cross-entropy. `chunked`: linear cross-entropy, a chunk
    of tokens at a time, with gradients that overwrite the logits, in Triton kernels on GPUs.
    `compiled`: the same with kernels that `torch.compile` generates when training starts. `eager`:
    PyTorch operations on the logits of all trained tokens at once, which takes by far the most
    memory. Tokens that are not trained are never passed to the LM head."""

    label_smoothing: Annotated[KeyedUnlessDefault[float], TOKEN_LOSS, OF_CROSS_ENTROPY, TRAINS] = (
        Field(default=0.0, ge=0, lt=1)
    )
    """Label smoothing: fraction of the target that is distributed uniformly over the vocabulary.
    `loss` in the metrics includes it."""

    z_loss_coef: Annotated[KeyedUnlessDefault[float], TOKEN_LOSS, OF_CROSS_ENTROPY, TRAINS] = Field(
        default=0.0, ge=0
    )
    """Coefficient of the z-loss, logsumexp(logits)^2 of each token, which keeps logits from
    drifting. 1e-4 is a common value. `loss` in the metrics includes it."""

    indexer_loss_coef: Annotated[
        KeyedUnlessDefault[float],
        TRAINS,
        _not_with("lora.enable_lora", "indexers have no adapters"),
        _not_with("train.enable_compile", "its observers are not compiled"),
        NativeOnly("indexers of native layers only are trained"),
    ] = Field(default=0.0, ge=0)
    """Sparse attention (DeepSeek V3.2, GLM 5): coefficient of the loss that trains the indexers,
    which changes no other weights: the KL divergence from index scores to the attention weights of
    all heads, over the selected tokens, per token and summed over layers. 0: indexers are frozen.
    `indexer_loss` in the metrics is its mean over layers, which `loss` does not include."""

    indexer_warmup: Annotated[
        KeyedUnlessDefault[bool],
        TRAINS,
        NotWith(
            "train.indexer_loss_coef",
            (0,),
            why="trains indexers only, and train.indexer_loss_coef is 0: nothing would be trained",
            instead="write indexer_loss_coef: 1.0",
        ),
        *(
            _not_with(setting, "the warm-up trains indexers only", unless=(0,))
            for setting in ("train.mtp_loss_weight", "train.moe_bias_update_rate")
        ),
        NativeOnly("indexers of native layers only are trained"),
    ] = False
    """Sparse attention: dense warm-up. Tokens attend to all earlier ones, the indexers' loss is
    over all of these, and only the indexers are trained. Needs `indexer_loss_coef`."""

    mtp_loss_weight: Annotated[
        KeyedUnlessDefault[float],
        TRAINS,
        _not_with("lora.enable_lora", "all weights of those layers are trained"),
        _not_with(
            "train.objective",
            "its loss is of whole completions, not of tokens",
            values=("preference",),
        ),
        NativeOnly("only layers of native models are trained to predict further"),
    ] = Field(default=0.0, ge=0)
    """Multi-token prediction (MTP): weight of the loss of the layers that predict further tokens,
    in models that have such layers (DeepSeek V3 and V3.2, GLM-4.5, GLM 5, Qwen3-Next, Qwen3.5).
    0.3 and 0.1 are DeepSeek-V3's values. 0: they are not trained, and exports have those of the
    base model. `mtp_loss` in the metrics is their loss, which `loss` does not include."""


# Pydantic takes the fields of the last base first.
class TrainConfig(
    LoggingConfig,
    EvaluationConfig,
    CheckpointConfig,
    Fp8TrainingConfig,
    MemoryConfig,
    BudgetConfig,
    BatchConfig,
    LossConfig,
    BalanceConfig,
    OptimConfig,
    ParallelConfig,
):
    """All settings of training that concern neither the model nor the data."""

    dropout: Annotated[
        KeyedUnlessDefault[DropoutConfig],
        NativeOnly("the rates are those of the model's config.json", "them in model.foundation"),
    ] = Field(default_factory=DropoutConfig)
    """Dropout probabilities."""

    @property
    def resolved_gradient_sync(self) -> Literal["micro_batch", "step"]:
        if self.fsdp_gradient_sync is not None:
            return self.fsdp_gradient_sync
        is_exact = self.fsdp_reduce_dtype == "fp32" and self.keeps_in == "float32"
        return "micro_batch" if is_exact and self.pipeline_parallel_size == 1 else "step"

    @property
    def rounds_updates(self) -> bool:
        in_state = self.optimizer != "adamw" and self.optimizer_dtype == "bf16"
        return in_state or self.keeps_in == "bfloat16"

    @property
    def keyed_grad_accum(self) -> Literal["bf16"] | None:
        """`grad_accum_dtype` in keys: null where it is what is used if unset."""
        is_bf16 = self.grad_accum_dtype == "bf16" and self.data_parallel_mode != "fsdp2"
        return "bf16" if is_bf16 else None

    @property
    def compensates_rounding(self) -> bool:
        """Whether updates that are smaller than the spacing of a weight's numbers are not lost."""
        return self.stochastic_rounding or bool(self.optimizer_kwargs.get("use_kahan_summation"))

    @property
    def resolved_zero_stage(self) -> Literal[1, 2, 3]:
        """The ZeRO stage under `fsdp2` that `zero_stage`, `reshard_after_forward` and
        `enable_full_shard` give: the first of them that is set decides."""
        if self.zero_stage is not None:
            return self.zero_stage
        if self.reshard_after_forward is not None:
            return 3 if self.reshard_after_forward else 2
        # A pipeline runs forward passes of several micro-batches before a backward pass: freed
        # weights would be gathered once for each.
        return 2 if not self.enable_full_shard or self.pipeline_parallel_size > 1 else 3
