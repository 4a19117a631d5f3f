"""Which model is trained, and the implementation of its layers."""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from penstock.config.schema.base import PATH, ConfigSection, require
from penstock.config.schema.cache_key import Keyed, KeyedByContent, KeyedUnlessDefault, Unkeyed
from penstock.config.schema.effect import OWN_EXPERTS, NativeOnly, NotWith, OnlyWith
from penstock.config.schema.served import Served

Attention = Literal[
    "eager", "sdpa", "native", "flash_attention_2", "flash_attention_3", "flash_attention_4"
]

Part = Literal["vision", "projector", "language"]
Modality = Literal["image", "video", "audio"]
Projector = Literal["mlp", "linear", "pixel_shuffle"]
SCALE_FACTOR = 2


DEEPEP = OnlyWith("model.ep_dispatch", ("deepep",))

# What keeps a part in fp32 changes nothing where everything is in fp32.
ROUNDS = OnlyWith("train.computes_in", ("bfloat16", "float16"), unmet="silent")

CASTS = OnlyWith("train.computes_in", ("float32", "float16"), unmet="silent")


class EncoderConfig(ConfigSection):
    """An encoder that is put before a text model."""

    model_path: Annotated[str | None, PATH] = Field(default=None, min_length=1)
    """Pre-trained weights of the vision tower: the hub id or local folder of a CLIP, SigLIP or
    DINOv2 model. Unset: the tower of `config_path`, with random initial weights."""

    config_path: Annotated[str | None, PATH] = Field(default=None, min_length=1)
    """The encoder's config.json and preprocessor_config.json, if they are not in `model_path`: a
    hub id, a local folder, `builtin:tiny-clip` or `builtin:tiny-siglip`. Unset: the same as
    `model_path`."""

    projector: Projector = "mlp"
    """What maps features to the width of the text model, from random initial weights: `mlp` (two
    layers with a GELU between, as in LLaVA 1.5) or `linear` (a linear map, as in the first LLaVA,
    stored as two layers without activation), both of a LLaVA; or `pixel_shuffle` (each square of
    `scale_factor` x `scale_factor` features is joined to one, and then mapped linearly), of an
    Idefics3, for SigLIP towers."""

    scale_factor: Annotated[
        int,
        OnlyWith(
            ".projector", ("pixel_shuffle",), why="is of a pixel shuffle, and the {name} is {value}"
        ),
    ] = Field(default=SCALE_FACTOR, ge=2)
    """Pixel shuffle: side of the square of features that become one. An image takes
    `scale_factor`² times fewer tokens. It must divide the number of patches along the side of an
    image."""

    @property
    def config_source(self) -> str:
        """Where the encoder's configuration is read: `config_path`, else `model_path`."""
        source = self.config_path or self.model_path
        assert source, "the rules admit no encoder without a source"
        return source


class ModelConfig(ConfigSection):
    """The base model, its tokenizer and its implementation."""

    model_path: KeyedByContent[Annotated[str | None, PATH]] = Field(default=None, min_length=1)
    """Pre-trained weights: a Hugging Face hub id or a local folder. Unset: the model of
    `config_path`, with random initial weights."""

    config_path: KeyedByContent[Annotated[str | None, PATH]] = Field(default=None, min_length=1)
    """The model's config.json, if it is not in `model_path`: a hub id, a local folder or
    `builtin:tiny-qwen3` (or `tiny-qwen3-moe`, `tiny-gpt-oss`). Unset: the same as `model_path`."""

    tokenizer_path: KeyedByContent[Annotated[str | None, PATH]] = Field(default=None, min_length=1)
    """The tokenizer: a hub id, a local folder or `builtin:bytes`. Unset: the same as
    `config_path`."""

    backend: KeyedUnlessDefault[Literal["auto", "native", "transformers"]] = "auto"
    """Whose model code is trained: `native` (fused kernels and all kinds of parallelism, for the
    families that `penstock models` lists), `transformers` (any causal language model or image-text
    model of the installed transformers; FSDP2, HSDP or DDP), or `auto`: native where the family
    is."""

    trust_remote_code: KeyedByContent[bool] = False
    """Run the model's own code: the Python files beside its config.json, which names them
    (`auto_map`), with `backend: transformers`. Only for code that you have read: it can do anything
    that you can. A local folder is identified by the content of these files, a hub id by
    `code_revision`."""

    code_revision: Annotated[
        KeyedByContent[str | None],
        OnlyWith("model.trust_remote_code", why="no code of the model is run"),
    ] = Field(default=None, min_length=1)
    """The commit of the hub repository whose config.json and code are used with
    `trust_remote_code`: 40 hexadecimal digits. Weights and tokenizer are those of its main branch.
    """

    attn_implementation: Annotated[
        Unkeyed[Attention | None],
        Served(
            documented="flash_attention_3",
            doc="Attention backend, as `model.attn_implementation` of a run. If it is not written: "
            "the best one on this machine; `flash_attention_3` is preferred where it is "
            "installed.",
        ),
    ] = None
    """Attention backend: `eager` (matmuls and softmax), `sdpa` (PyTorch's scaled dot-product
    attention), `native` (PyTorch's variable-length and flex attention; CUDA), or one of the
    packages `flash_attention_2` (Ampere and later), `flash_attention_3` (Hopper) and
    `flash_attention_4` (Hopper and Blackwell), which must be installed. Unset: the best one on this
    machine; `flash_attention_3` is preferred where it is installed."""

    moe_implementation: Annotated[
        Unkeyed[Literal["eager", "triton", "native", "quack"] | None], Served(), OWN_EXPERTS
    ] = None
    """Mixture-of-experts kernels: `eager` (a loop over experts), `triton` (group GEMM), `native`
    (PyTorch's grouped matmul) or `quack` (an optional package; Hopper and Blackwell). Unset: the
    best one on this machine for the model's experts."""

    router_fp32: Annotated[KeyedUnlessDefault[bool], ROUNDS, Served(), OWN_EXPERTS] = True
    """Mixture of experts: store router weights and compute router logits in fp32 even where the
    rest is computed in bf16, so that rounding does not change which experts are chosen."""

    freeze_router: Annotated[KeyedUnlessDefault[bool], Served(default=True), OWN_EXPERTS] = False
    """Mixture of experts: do not train router weights. Gradients still flow through the routing
    weights to earlier layers."""

    lm_head_fp32: Annotated[KeyedUnlessDefault[bool], ROUNDS, Served(default=True)] = False
    """Compute logits in fp32 even where the rest is computed in bf16, from the hidden states and
    the LM head's weights as they are, so that logits are not rounded before the loss. On a GPU
    these matmuls take many times as long, and need an fp32 copy of the LM head while they run."""

    rmsnorm_native: Annotated[Unkeyed[bool], Served(), NativeOnly()] = False
    """Compute norms, and the residual additions before them, with PyTorch's eager operations, which
    round where Hugging Face's models do, even where a fused kernel is available."""

    activation_native: Annotated[Unkeyed[bool], Served(), NativeOnly()] = False
    """Compute the activations of feed-forward networks and experts with PyTorch's eager operations
    even where a fused kernel is available."""

    rope_native: Annotated[Unkeyed[bool], Served(), NativeOnly()] = False
    """Compute rotary position embeddings (RoPE) with PyTorch's eager operations even where a fused
    kernel is available."""

    attention_cast_bf16: Annotated[KeyedUnlessDefault[bool], CASTS, Served()] = False
    """Cast queries, keys and values to bf16 and compute attention in bf16, even where the rest is
    computed in fp32."""

    ep_dispatch: Annotated[
        Unkeyed[Literal["alltoall", "deepep"]],
        NotWith(
            "train.computes_in",
            unless=("bfloat16",),
            why="deepep supports bfloat16 only, and this run computes in {value}",
            instead="write train.precision: bf16_mixed, or ep_dispatch: alltoall",
            reads=("train.enable_mixed_precision", "train.precision"),
        ),
        Served(),
        OWN_EXPERTS,
    ] = "alltoall"
    """Token dispatcher of expert parallelism: `alltoall`, or `deepep`, an optional package that
    uses NVLink between 2, 4 or 8 GPUs of one node, in bf16. Without the package or such GPUs,
    `deepep` is an error."""

    deepep_buffer_size_gb: Annotated[Unkeyed[float], DEEPEP, Served()] = Field(default=2.0, gt=0)
    """DeepEP: size of the buffer of each GPU, in gigabytes."""

    deepep_num_sms: Annotated[Unkeyed[int], DEEPEP, Served()] = Field(
        default=20, gt=0, multiple_of=2
    )
    """DeepEP: number of streaming multiprocessors (SMs) reserved for communication; even. Fewer
    leave more for computation that overlaps with it."""

    deepep_async_combine: Annotated[Unkeyed[bool], DEEPEP, Served()] = False
    """DeepEP: overlap the transfer of expert outputs (combine) with the computation of the layer's
    shared experts. No effect on models without shared experts."""

    merge_qkv: Annotated[Keyed[bool], Served(), NativeOnly()] = True
    """Fuse the query, key and value projections into one matrix, `qkv_proj`. No effect on latent
    attention, which has other projections."""

    basic_modules: Annotated[Unkeyed[list[str]], Served()] = Field(default_factory=list[str])
    """Names of further module classes that FSDP shards as separate units, besides the decoder
    layers. The embedding, and the final norm with the LM head, are units of their own anyway,
    unless both share their weights."""

    foundation: Annotated[Keyed[dict[str, Any]], Served()] = Field(default_factory=dict[str, Any])
    """Overrides of entries of the model's config.json, for example `{num_hidden_layers: 4}`."""

    freeze: Annotated[
        KeyedUnlessDefault[list[Part] | None],
        require(
            lambda parts: {*parts} != {*get_args(Part)},
            "is {value}, all parts of a model, and nothing would be trained; leave one out",
        ),
        NotWith(
            "lora.enable_lora",
            why="is {own}, and with lora.enable_lora all of the model's own weights are frozen",
            instead="leave it out",
        ),
    ] = None
    """Multimodal models trained on images or audio: the parts whose weights are not trained, of
    `vision` (the tower of images or audio), `projector` and `language`. Unset: `[vision,
    projector]`. An empty list trains everything. With LoRA all of the model's own weights are
    frozen."""

    encoders: Annotated[
        Keyed[dict[Modality, EncoderConfig]],
        NotWith(
            "model.trust_remote_code",
            why="is for text models that Penstock's own code computes, and {name}: true runs the"
            " model's",
        ),
    ] = Field(default_factory=dict[Modality, EncoderConfig])
    """Encoders to put before a text model, by modality: `{image: {model_path:
    google/siglip-base-patch16-224}}` trains a vision-language model (LLaVA, or Idefics3 with a
    pixel shuffle) of the model in `model_path` and that vision tower. It is composed once, when the
    first run with it is planned, and shared by all runs with the same parts and `train.seed`;
    `foundation` applies to the text model. `audio` and `video` are errors: no architecture joins a
    new one of these to a text model; models that have them (`penstock models`) are trained as they
    are, by their name in `model_path`."""

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
