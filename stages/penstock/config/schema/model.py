"""Which model is trained, and how its layers are carried out."""

from typing import Any, Literal

from pydantic import Field

from penstock.config.schema.base import ConfigSection
from penstock.config.schema.cache_key import Keyed, KeyedByContent, KeyedUnlessDefault, Unkeyed

Attention = Literal[
    "eager", "sdpa", "native", "flash_attention_2", "flash_attention_3", "flash_attention_4"
]


class ModelConfig(ConfigSection):
    """The base model, its tokenizer and its implementation."""

    model_path: KeyedByContent[str | None] = Field(default=None, min_length=1)
    """Pre-trained weights: a Hugging Face hub id or a local folder. Without it the model of
    `config_path` starts from random weights."""

    config_path: KeyedByContent[str | None] = Field(default=None, min_length=1)
    """The model's configuration, when it is not in `model_path`: a hub id, a local folder or
    `builtin:tiny-qwen3` (or `tiny-qwen3-moe`, `tiny-gpt-oss`). Unset: the same as `model_path`."""

    tokenizer_path: KeyedByContent[str | None] = Field(default=None, min_length=1)
    """The tokenizer: a hub id, a local folder or `builtin:bytes`. Unset: the same as
    `config_path`."""

    attn_implementation: Unkeyed[Attention | None] = None
    """Attention backend: `eager` (plain matrix products), `sdpa` (PyTorch's fused attention),
    `native` (PyTorch's variable-length and flex kernels; CUDA), and the packages
    `flash_attention_2` (Ampere and later), `flash_attention_3` (Hopper) and `flash_attention_4`
    (Hopper and Blackwell), which are refused where they are not installed. Unset: the best this
    machine has, with `flash_attention_3` preferred where it is installed."""

    moe_implementation: Unkeyed[Literal["eager", "triton", "native", "quack"] | None] = None
    """Mixture-of-experts kernels: `eager` (one expert after another), `triton` (group GEMM),
    `native` (PyTorch's grouped product) or `quack` (an optional package, Hopper and Blackwell).
    Unset: the best that this machine has for the model's experts."""

    router_fp32: KeyedUnlessDefault[bool] = True
    """Mixture of experts: keep routers' weights and compute their logits in fp32 also where the
    rest is computed in bf16, so that rounding does not choose the experts."""

    freeze_router: KeyedUnlessDefault[bool] = False
    """Mixture of experts: leave routers' weights as they are. Gradients still flow through the
    experts' weights into what comes before."""

    lm_head_fp32: KeyedUnlessDefault[bool] = False
    """Compute logits in fp32 also where the rest is computed in bf16, of the head's weights and the
    hidden states as they are there, so that no rounding lies between them and the loss. On a GPU
    such products take many times as long, and the head is held in fp32 while they last."""

    rmsnorm_native: Unkeyed[bool] = False
    """Compute norms, and what is added to the residual stream before them, with PyTorch's plain
    operations, rounding where Hugging Face's models do, also where a fused kernel serves."""

    activation_native: Unkeyed[bool] = False
    """The same of feed-forward networks' activations, experts' among them."""

    rope_native: Unkeyed[bool] = False
    """The same of rotary position embedding."""

    attention_cast_bf16: KeyedUnlessDefault[bool] = False
    """Compute attention in bf16, from queries, keys and values on, also where the rest is computed
    in fp32."""

    ep_dispatch: Unkeyed[Literal["alltoall", "deepep"]] = "alltoall"
    """How tokens travel between ranks that hold different experts: `alltoall`, or `deepep`, an
    optional package, over NVLink between 2, 4 or 8 GPUs of one machine, in bf16. Without the
    package or such GPUs the run is refused."""

    deepep_buffer_size_gb: Unkeyed[float] = Field(default=2.0, gt=0)
    """DeepEP: buffer per GPU, in gigabytes."""

    deepep_num_sms: Unkeyed[int] = Field(default=20, gt=0, multiple_of=2)
    """DeepEP: streaming multiprocessors set aside for communication; even. Fewer leave more for
    computation that overlaps with it."""

    deepep_async_combine: Unkeyed[bool] = False
    """DeepEP: let expert outputs return while the next thing is computed that does not wait for
    them: the layer's shared experts. A model without those gains nothing."""

    merge_qkv: Keyed[bool] = True
    """Keep the query, key and value projections as one fused matrix, `qkv_proj`."""

    basic_modules: Unkeyed[list[str]] = Field(default_factory=list[str])
    """Names of further module classes that FSDP shards as units of their own, beside the decoder
    layers."""

    foundation: Keyed[dict[str, Any]] = Field(default_factory=dict[str, Any])
    """Entries that replace those of the model's own configuration, for example
    `{num_hidden_layers: 4}`."""

    encoders: Keyed[dict[str, Any]] = Field(default_factory=dict[str, Any])
    """Encoders of multimodal models by kind (`image`, `video`, `audio`). Anything in it is refused:
    the families here read text alone."""

    @property
    def config_source(self) -> str:
        """Where the model's configuration is read: `config_path`, else `model_path`."""
        source = self.config_path or self.model_path
        assert source, "the rules admit no run without a model"
        return source

    @property
    def tokenizer_source(self) -> str:
        """Where the tokenizer is read: `tokenizer_path`, else where the configuration is."""
        return self.tokenizer_path or self.config_source
