"""Maps Hugging Face checkpoint tensors to the model's parameters and back.

A native tensor is the concatenation of checkpoint tensors along the rows, with all dimensions but
the last flattened. Mostly it is one tensor of the same name. With `merge_qkv` q_proj, k_proj and
v_proj are concatenated to `qkv_proj`, unless a checkpoint has them as one tensor already. The
experts of a layer are two tensors: `gate_up_proj`, with the rows of gate and then up of each
expert, and `down_proj`. Expert tensors that are already fused in the checkpoint stay as they are.
No torch, because planning uses the shapes too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from penstock.models.decoder_config import DecoderConfig, ExpertsConfig
from penstock.models.names import (
    EMBEDDING_WEIGHT,
    HEAD_WEIGHT,
    LAYER_SCALAR,
    LINEAR_ATTN,
    POSITIONS_WEIGHT,
    SELECTION_BIAS,
    SELF_ATTN,
)

QKV_PROJ = "qkv_proj"
GATE_UP_PROJ = "gate_up_proj"
LAYERS = "model.layers."

Shape = tuple[int, ...]


@dataclass(frozen=True)
class _NativeParam:
    """A parameter of the model."""

    shape: Shape
    parts: Mapping[str, Shape]
    """Its checkpoint tensors, in order."""


@dataclass(frozen=True)
class WeightMap:
    """Names and shapes of a model's tensors, native and in a checkpoint."""

    config: DecoderConfig
    merge_qkv: bool = False
    multimodal: bool = False
    """Whether it is the language model of a multimodal model; see multimodal.py for its names in
    files. The names here are those of a text model."""

    def native_names(self) -> tuple[str, ...]:
        """The model's parameters, in the order of `named_parameters()`, without a tied head."""
        return tuple(self._native_params)

    def native_shape(self, native_name: str) -> Shape:
        """The shape of a native tensor."""
        return self._native_params[native_name].shape

    def hf_names(self, native_name: str) -> tuple[str, ...]:
        """The checkpoint tensors whose concatenated rows are the native tensor.

        A name that is not a parameter, such as a tied head, maps to itself.
        """
        native = self._native_params.get(native_name)
        return tuple(native.parts) if native else (native_name,)

    def row_blocks(self, hf_layer: str, rows: int) -> Mapping[str, int]:
        """The layers whose rows are the checkpoint's layer `hf_layer`, which has so many rows, by
        the last part of their names: one, or several where a checkpoint has them as one layer."""
        parent, _, last = hf_layer.rpartition(".")
        if (linear := self.config.linear) and parent.endswith(LINEAR_ATTN):
            return linear.row_blocks(last) or {last: rows}
        if last == QKV_PROJ and self.config.fused_qkv:
            return self.layer_config(hf_layer).qkv_features
        if last == GATE_UP_PROJ and self.config.fused_gate_up:
            return dict.fromkeys(("gate_proj", "up_proj"), rows // 2)
        return {last: rows}

    def expert_layers(self, matrix: str, layer: str) -> tuple[str, ...]:
        """The checkpoint's linear layers that are `matrix` (`gate_proj`, `up_proj` or `down_proj`)
        of the experts in `layer` (`model.layers.0`), by expert index; none where the checkpoint has
        one tensor for all experts."""
        if self.config.experts is None or self.config.experts.is_stacked:
            return ()
        is_input = matrix != "down_proj"
        tensors = self.hf_names(f"{layer}.mlp.experts.{'gate_up_proj' if is_input else matrix}")
        chosen = tensors[("gate_proj", "up_proj").index(matrix) :: 2] if is_input else tensors
        return tuple(name.removesuffix(".weight") for name in chosen)

    @property
    def num_experts(self) -> int:
        """Experts of a MoE layer; 0 without any."""
        return self.config.experts.num_experts if self.config.experts else 0

    @property
    def has_stacked_experts(self) -> bool:
        """Whether a checkpoint has one tensor for all experts of a layer."""
        return bool(self.config.experts and self.config.experts.is_stacked)

    def is_transposed(self, native_name: str) -> bool:
        """Whether the matrices of this tensor, which stacks experts, are [in, out]."""
        del native_name
        return bool(self.config.experts and self.config.experts.is_transposed)

    def stack_parameter(self, native_name: str) -> str:
        """Transformers' parameter of a native tensor that stacks the experts of a layer."""
        assert self.config.experts is not None
        layer, _, tensor = native_name.partition(".mlp.")
        return f"{layer}.{self.config.experts.names.block}.{tensor}"

    def layer_config(self, name: str) -> DecoderConfig:
        """The config with the head sizes of the layer of a parameter or module."""
        _, _, rest = name.partition(".layers.")
        number = rest.partition(".")[0]
        return self.config.of_layer(int(number)) if number else self.config

    def hf_shapes(self) -> Mapping[str, Shape]:
        """The shape of every tensor that a checkpoint must have."""
        return {
            hf_name: shape
            for native in self._native_params.values()
            for hf_name, shape in native.parts.items()
        }

    def is_exact(self, hf_name: str) -> bool:
        """Whether a checkpoint stores this tensor in fp32, whatever the dtype of the others:
        rounding it would change which experts are selected."""
        experts = self.config.experts
        if experts is None:
            return False
        router = f".{experts.names.block}.{experts.names.router}.weight"
        is_bias = bool(experts.selection_bias) and hf_name.endswith(experts.names.selection_bias)
        return is_bias or (experts.fp32_router and hf_name.endswith(router))

    @cached_property
    def _native_params(self) -> Mapping[str, _NativeParam]:
        return dict(self._iter_params())

    def _iter_params(self) -> Iterator[tuple[str, _NativeParam]]:
        config = self.config
        table = (config.vocab_size, config.hidden_size)
        names = config.names
        yield _renamed(EMBEDDING_WEIGHT, names.embedding, table)
        if positions := config.learned_positions:
            yield _renamed(POSITIONS_WEIGHT, names.positions, (positions.rows, table[1]))
        for layer in range(config.num_hidden_layers):
            at, stored = f"{LAYERS}{layer}", f"{names.backbone}.layers.{layer}"
            if config.layer_scalars:
                yield _renamed(f"{at}.{LAYER_SCALAR}", f"{stored}.{LAYER_SCALAR}", (1,))
            if config.input_norms:
                yield from self._norm(f"{at}.input_layernorm", f"{stored}.{names.attention_norm}")
            if config.layer_mixer(layer) == LINEAR_ATTN:
                yield from self._linear_attention(f"{at}.{LINEAR_ATTN}", f"{stored}.{LINEAR_ATTN}")
            else:
                yield from self._attention(at, stored, config.of_layer(layer))
            if config.output_norms:
                output_norm = f"{stored}.{names.attention_output_norm}"
                yield from self._norm(f"{at}.attention_output_norm", output_norm)
            if config.input_norms and not config.parallel_block:
                mlp_norm = f"{stored}.{names.mlp_norm}"
                yield from self._norm(f"{at}.post_attention_layernorm", mlp_norm)
            if experts := config.layer_experts(layer):
                yield from self._moe(at, experts)
            else:
                yield from self._mlp(at, stored)
            if config.output_norms:
                yield from self._norm(f"{at}.mlp_output_norm", f"{stored}.{names.mlp_output_norm}")
        yield from self._norm("model.norm", f"{names.backbone}.{names.norm}")
        if not config.tie_word_embeddings:
            yield _same(HEAD_WEIGHT, table)

    def _norm(self, at: str, stored: str) -> Iterator[tuple[str, _NativeParam]]:
        for leaf in self.config.norm_parameters:
            yield _renamed(f"{at}.{leaf}", f"{stored}.{leaf}", (self.config.hidden_size,))

    def _linear_attention(self, at: str, stored: str) -> Iterator[tuple[str, _NativeParam]]:
        assert self.config.linear is not None
        for name, shape in self.config.linear.shapes(self.config.hidden_size).items():
            yield _renamed(f"{at}.{name}", f"{stored}.{name}", shape)

    def _attention(
        self, layer: str, stored_layer: str, config: DecoderConfig
    ) -> Iterator[tuple[str, _NativeParam]]:
        at, stored = f"{layer}.{SELF_ATTN}", f"{stored_layer}.{SELF_ATTN}"
        if latent := config.latent:
            shapes = latent.shapes(config.hidden_size, config.num_attention_heads)
            for name, shape in shapes.items():
                yield _renamed(f"{at}.{name}", f"{stored}.{name}", shape)
            return
        width, parts = config.hidden_size, config.qkv_features
        if config.attention_sinks:
            yield _same(f"{at}.sinks", (config.num_attention_heads,))
        leaves = {"weight": (width,), **({"bias": ()} if config.qkv_bias else {})}
        if config.fused_qkv:
            for leaf, rest in leaves.items():
                name = f"{QKV_PROJ}.{leaf}"
                shape = (sum(parts.values()), *rest)
                yield _renamed(f"{at}.{name}", f"{stored}.{name}", shape)
        elif self.merge_qkv:
            for leaf, rest in leaves.items():
                yield (
                    f"{at}.{QKV_PROJ}.{leaf}",
                    _NativeParam(
                        (sum(parts.values()), *rest),
                        {f"{stored}.{part}.{leaf}": (rows, *rest) for part, rows in parts.items()},
                    ),
                )
        else:
            for part, rows in parts.items():
                for leaf, rest in leaves.items():
                    name = f"{part}.{leaf}"
                    yield _renamed(f"{at}.{name}", f"{stored}.{name}", (rows, *rest))
        out = f"{stored_layer}.{config.names.o_proj}"
        outputs = config.num_attention_heads * config.head_dim
        yield from _linear(f"{at}.o_proj", out, (width, outputs), config.o_bias)
        if config.qk_norm:
            is_per_head = config.qk_norm_over == "head"
            for norm, name, part in (
                ("q_norm", config.names.q_norm, "q_proj"),
                ("k_norm", config.names.k_norm, "k_proj"),
            ):
                shape = (config.head_dim if is_per_head else parts[part],)
                yield _renamed(f"{at}.{norm}.weight", f"{stored}.{name}.weight", shape)

    def _mlp(self, layer: str, stored: str) -> Iterator[tuple[str, _NativeParam]]:
        """The MLP of a dense layer."""
        config, names = self.config, self.config.names
        up, bias = (config.intermediate_size, config.hidden_size), config.mlp_bias
        if config.fused_gate_up:
            both, name = (2 * up[0], up[1]), f"mlp.{GATE_UP_PROJ}"
            yield from _linear(f"{layer}.{name}", f"{stored}.{name}", both, bias)
        elif config.gated:
            yield from _linear(f"{layer}.mlp.gate_proj", f"{stored}.{names.gate_proj}", up, bias)
        if not config.fused_gate_up:
            yield from _linear(f"{layer}.mlp.up_proj", f"{stored}.{names.up_proj}", up, bias)
        yield from _linear(f"{layer}.mlp.down_proj", f"{stored}.{names.down_proj}", up[::-1], bias)

    def _shared_mlp(self, at: str, stored: str, inner: int) -> Iterator[tuple[str, _NativeParam]]:
        """The MLP of shared experts."""
        up, bias = (inner, self.config.hidden_size), self.config.mlp_bias
        for part in ("gate_proj", "up_proj") if self.config.gated else ("up_proj",):
            yield from _linear(f"{at}.{part}", f"{stored}.{part}", up, bias)
        yield from _linear(f"{at}.down_proj", f"{stored}.down_proj", up[::-1], bias)

    def _moe(self, layer: str, experts: ExpertsConfig) -> Iterator[tuple[str, _NativeParam]]:
        at, names = f"{layer}.mlp", experts.names
        stored = f"{layer}.{names.block}"
        scores = (experts.num_experts, self.config.hidden_size)
        yield from _linear(f"{at}.gate", f"{stored}.{names.router}", scores, experts.router_bias)
        if bias := experts.selection_bias:
            yield _renamed(f"{at}.gate.{SELECTION_BIAS}", f"{stored}.{names.selection_bias}", bias)
        yield from self._experts(f"{at}.experts", stored, experts)
        if experts.shared_intermediate_size:
            shared, inner = f".{names.shared}", experts.shared_intermediate_size
            yield from self._shared_mlp(f"{at}{shared}", f"{stored}{shared}", inner)
        if experts.shared_gate:
            gate = f".{names.shared_gate}"
            yield from _linear(f"{at}{gate}", f"{stored}{gate}", (1, scores[1]), bias=False)

    def _experts(
        self, at: str, stored: str, experts: ExpertsConfig
    ) -> Iterator[tuple[str, _NativeParam]]:
        count, inner, width = (
            experts.num_experts,
            experts.intermediate_size,
            self.config.hidden_size,
        )
        names = experts.names
        if experts.is_stacked:
            for matrix, stack, shape in (
                ("gate_up_proj", names.gate_up_stack, (2 * inner, width)),
                ("down_proj", names.down_stack, (width, inner)),
            ):
                matrices = shape[::-1] if experts.is_transposed else shape
                yield _renamed(f"{at}.{matrix}", f"{stored}.{stack}", (count, *matrices))
                if experts.clamped:
                    bias = f"{matrix}_bias"
                    yield _renamed(f"{at}.{bias}", f"{stored}.{stack}_bias", (count, shape[0]))
            return
        each = [f"{stored}.experts.{number}" for number in range(count)]
        gate_up_shapes = {
            f"{expert}.{part}.weight": (inner, width)
            for expert in each
            for part in (names.gate, names.up)
        }
        yield f"{at}.gate_up_proj", _NativeParam((count, 2 * inner, width), gate_up_shapes)
        down_shapes = {f"{expert}.{names.down}.weight": (width, inner) for expert in each}
        yield f"{at}.down_proj", _NativeParam((count, width, inner), down_shapes)


def _same(name: str, shape: Shape) -> tuple[str, _NativeParam]:
    return _renamed(name, name, shape)


def _renamed(name: str, stored: str, shape: Shape) -> tuple[str, _NativeParam]:
    return name, _NativeParam(shape, {stored: shape})


def _linear(name: str, stored: str, shape: Shape, bias: bool) -> Iterator[tuple[str, _NativeParam]]:
    yield _renamed(f"{name}.weight", f"{stored}.weight", shape)
    if bias:
        yield _renamed(f"{name}.bias", f"{stored}.bias", shape[:1])
