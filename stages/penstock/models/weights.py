"""Maps Hugging Face checkpoint tensors to the model's parameters and back.

A native tensor is the concatenation of checkpoint tensors along the rows, with all dimensions but
the last flattened. Mostly it is one tensor of the same name. With `merge_qkv` q_proj, k_proj and
v_proj are concatenated to `qkv_proj`, unless a checkpoint has them as one tensor already. The
experts of a layer are two tensors: `gate_up_proj`, with the rows of gate and then up of each
expert (`up_proj` without a gate), and `down_proj`. Expert tensors that are already fused in the
checkpoint stay as they are.
No torch, because planning uses the shapes too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from penstock.models.decoder_config import DecoderConfig, ExpertsConfig, TensorNames
from penstock.models.mtp_config import MTPNames
from penstock.models.multimodal import BACKBONE, is_language, stored_name, text_name
from penstock.models.names import (
    EMBEDDING_WEIGHT,
    HEAD_WEIGHT,
    IMAGE_EXPERTS,
    LAYER_SCALAR,
    LINEAR_ATTN,
    POSITIONS_WEIGHT,
    SELECTION_BIAS,
    SELF_ATTN,
)
from penstock.models.state_layer_config import Shape, StateLayerConfig
from penstock.models.vision.types import VISION

QKV_PROJ = "qkv_proj"
GATE_UP_PROJ = "gate_up_proj"
LAYERS = "model.layers."


@dataclass(frozen=True)
class _NativeParam:
    """A parameter of the model."""

    shape: Shape
    parts: Mapping[str, Shape]
    """Its checkpoint tensors, in order."""


Params = Iterator[tuple[str, _NativeParam]]
# Names in the MLP of shared experts, where it is within the block of experts.
SHARED_NAMES = TensorNames(gate_proj="gate_proj", up_proj="up_proj", down_proj="down_proj")


@dataclass(frozen=True)
class WeightMap:
    """Names and shapes of a model's tensors, native and in a checkpoint."""

    config: DecoderConfig
    merge_qkv: bool = False
    multimodal: str = ""
    """The backbone in transformers' class, with a dot at the end, if it is the language model of a
    multimodal model; see multimodal.py for its names in files. The names here are those of a text
    model."""
    vision: Mapping[str, Shape] = field(default_factory=dict[str, Shape])
    """The shapes of the vision part's parameters by their names in the model, `vision.` and more; a
    checkpoint has them with `model.` instead, as transformers' class. Empty where it is not
    built."""

    def native_names(self) -> tuple[str, ...]:
        """The model's parameters, in the order of `named_parameters()`, without a tied head."""
        return tuple(self._native_params)

    def native_shape(self, native_name: str) -> Shape:
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
        last = hf_layer.rpartition(".")[2]
        if linear := self.state_layer(hf_layer):
            return linear.row_blocks(last) or {last: rows}
        if last == QKV_PROJ and self.config.fused_qkv:
            return self.layer_config(hf_layer).qkv_features
        if self.config.fused_gate_up and hf_layer.endswith(self.config.names.gate_up_proj):
            return dict.fromkeys(("gate_proj", "up_proj"), rows // 2)
        return {last: rows}

    def expert_layers(self, matrix: str, layer: str) -> tuple[str, ...]:
        """The checkpoint's linear layers that are `matrix` (one of `expert_matrices`) of the
        experts in `layer` (`model.layers.0`), by expert index; none where the checkpoint has one
        tensor for all experts."""
        if self.config.experts is None or self.config.experts.is_stacked:
            return ()
        *inputs, last = self.expert_matrices
        stack = GATE_UP_PROJ if matrix != last and self.config.gated else matrix
        tensors = self.hf_names(f"{layer}.mlp.experts.{stack}")
        # Gate and up of an expert follow one another, then come those of the next.
        chosen = tensors if matrix == last else tensors[inputs.index(matrix) :: len(inputs)]
        return tuple(name.removesuffix(".weight") for name in chosen)

    @property
    def expert_matrices(self) -> tuple[str, ...]:
        """The matrices of an expert, the output projection last."""
        return (*(("gate_proj",) if self.config.gated else ()), "up_proj", "down_proj")

    @property
    def num_experts(self) -> int:
        """Experts of a MoE layer; 0 without any."""
        return self.config.experts.num_experts if self.config.experts else 0

    @property
    def has_stacked_experts(self) -> bool:
        """Whether a checkpoint has one tensor for all experts of a layer."""
        return bool(self.config.experts and self.config.experts.is_stacked)

    @property
    def has_stacked_adapters(self) -> bool:
        # Whether PEFT has an adapter of all experts at once: where a checkpoint has one tensor for
        # them, and where they have no gate, as it converts no other names of theirs.
        return self.has_stacked_experts or (self.num_experts > 0 and not self.config.gated)

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
        _, _, suffix = name.partition(".layers.")
        number = suffix.partition(".")[0]
        return self.config.of_layer(int(number)) if number else self.config

    @property
    def is_multimodal(self) -> bool:
        """Whether it is the language model of a multimodal model, or such a model."""
        return bool(self.multimodal)

    @property
    def absent_parts(self) -> tuple[str, ...]:
        """Beginnings of the names in files of parts that are not built."""
        return ()

    def module_name(self, hf_name: str) -> str:
        """Transformers' name of a checkpoint's module or parameter, by which PEFT knows it."""
        names = self.config.names
        if self.multimodal:
            return stored_name(hf_name, self.multimodal) if is_language(f"{hf_name}.") else hf_name
        return _with_backbone(hf_name, names.backbone, names.module_backbone or names.backbone)

    def hf_name(self, module_name: str) -> str:
        names = self.config.names
        if self.multimodal:
            return text_name(module_name)
        return _with_backbone(module_name, names.module_backbone or names.backbone, names.backbone)

    def hf_layer(self, layer: str) -> str:
        """The checkpoint's name of a linear layer, or of one of those whose rows it has: `layer` is
        the name of the module whose last part is that of the checkpoint's name."""
        return self._hf_layers.get(layer, layer)

    @cached_property
    def _hf_layers(self) -> Mapping[str, str]:
        hf_layers: dict[str, str] = {}
        for native, param in self._native_params.items():
            module, _, leaf = native.rpartition(".")
            for tensor in param.parts if leaf == "weight" and native != EMBEDDING_WEIGHT else ():
                stored = tensor.removesuffix(".weight")
                hf_layers[f"{module.rpartition('.')[0]}.{stored.rpartition('.')[2]}"] = stored
        return hf_layers

    def state_layer(self, name: str) -> StateLayerConfig | None:
        """The kind of token mixer with a state that a checkpoint's module or parameter is of, if it
        is."""
        number, _, module = name.partition(".layers.")[2].partition(".")
        linear = self.config.linear
        if linear is None or not module.startswith(f"{linear.module}."):
            return None
        return linear if int(number) in self.config.linear_layers else None

    def hf_shapes(self) -> Mapping[str, Shape]:
        """The shape of every tensor that a checkpoint must have."""
        return {
            hf_name: shape
            for native in self._native_params.values()
            for hf_name, shape in native.parts.items()
        }

    def is_exact(self, hf_name: str) -> bool:
        # Whether a checkpoint stores this tensor in fp32, whatever the dtype of the others:
        # rounding it would change which experts are selected.
        experts = self.config.experts
        if experts is None:
            return False
        expert_names = [names.names for names in (experts, experts.of_images) if names]
        routers = tuple(f".{names.block}.{names.router}.weight" for names in expert_names)
        biases = tuple(names.selection_bias for names in expert_names)
        is_bias = bool(experts.selection_bias) and hf_name.endswith(biases)
        return is_bias or (experts.fp32_router and hf_name.endswith(routers))

    @cached_property
    def _native_params(self) -> Mapping[str, _NativeParam]:
        return dict(self._iter_params())

    def _iter_params(self) -> Params:
        config = self.config
        table = (config.vocab_size, config.hidden_size)
        names = config.names
        for name, shape in self.vision.items():
            yield _renamed(name, vision_name(name), shape)
        yield _renamed(EMBEDDING_WEIGHT, names.embedding, table)
        if positions := config.learned_positions:
            yield _renamed(POSITIONS_WEIGHT, names.positions, (positions.rows, table[1]))
        for layer in range(config.num_hidden_layers):
            yield from self._layer(layer, f"{names.backbone}.layers.{layer}")
        if config.mtp:
            for depth in range(config.mtp.num_layers):
                yield from self._prediction_layer(depth, config.mtp.names)
        yield from self._norm("model.norm", f"{names.backbone}.{names.norm}")
        if not config.tie_word_embeddings:
            yield _same(HEAD_WEIGHT, table)

    def _layer(self, layer: int, stored: str) -> Params:
        prefix = f"{LAYERS}{layer}"
        if self.config.layer_scalars:
            yield _renamed(f"{prefix}.{LAYER_SCALAR}", f"{stored}.{LAYER_SCALAR}", (1,))
        if self.config.layer_mixer(layer):
            yield from self._mixer(layer, prefix, stored)
        if self.config.has_mlp(layer):
            yield from self._network(layer, prefix, stored)

    def _mixer(self, layer: int, prefix: str, stored: str) -> Params:
        config, names = self.config, self.config.names
        input_norms, output_norms = config.layer_norms(layer)
        if input_norms:
            yield from self._norm(f"{prefix}.input_layernorm", f"{stored}.{names.attention_norm}")
        if config.layer_mixer(layer) == LINEAR_ATTN:
            linear = config.linear
            assert linear is not None
            for name, shape in linear.shapes(config.hidden_size).items():
                rows = linear.stored(name, shape).items()
                parts = {
                    f"{stored}.{linear.module}.{part}": part_shape for part, part_shape in rows
                }
                yield f"{prefix}.{LINEAR_ATTN}.{name}", _NativeParam(shape, parts)
        else:
            yield from self._attention(prefix, stored, config.of_layer(layer))
        if output_norms:
            output_norm = f"{stored}.{names.attention_output_norm}"
            yield from self._norm(f"{prefix}.attention_output_norm", output_norm)

    def _network(self, layer: int, prefix: str, stored: str) -> Params:
        config, names = self.config, self.config.names
        input_norms, output_norms = config.layer_norms(layer)
        if input_norms and not config.parallel_block:
            yield from self._norm(
                f"{prefix}.post_attention_layernorm", f"{stored}.{names.mlp_norm}"
            )
        if experts := config.layer_experts(layer):
            yield from self._moe(prefix, stored, experts)
        else:
            yield from self._mlp(f"{prefix}.mlp", stored, config.intermediate_size, names)
        if output_norms:
            yield from self._norm(f"{prefix}.mlp_output_norm", f"{stored}.{names.mlp_output_norm}")

    def _prediction_layer(self, depth: int, names: MTPNames) -> Params:
        layer, width = self.config.num_hidden_layers + depth, self.config.hidden_size
        prefix = f"{LAYERS}{layer}"

        def stored(name: str) -> str:
            return name.format(layer=layer, depth=depth)

        yield from self._layer(layer, stored(names.block))
        yield from self._norm(f"{prefix}.enorm", stored(names.enorm))
        yield from self._norm(f"{prefix}.hnorm", stored(names.hnorm))
        projection = (width, 2 * width)
        yield from _linear(f"{prefix}.eh_proj", stored(names.eh_proj), projection, bias=False)
        yield from self._norm(f"{prefix}.norm", stored(names.norm))

    def _norm(self, prefix: str, stored: str) -> Params:
        for leaf in self.config.norm_parameters:
            yield _renamed(f"{prefix}.{leaf}", f"{stored}.{leaf}", (self.config.hidden_size,))

    def _attention(self, layer: str, stored_layer: str, config: DecoderConfig) -> Params:
        prefix = f"{layer}.{SELF_ATTN}"
        stored = f"{stored_layer}.{config.names.attention}"
        if latent := config.latent:
            shapes = latent.shapes(config.hidden_size, config.num_attention_heads)
            for name, shape in shapes.items():
                yield _renamed(f"{prefix}.{name}", f"{stored}.{name}", shape)
            return
        width, parts = config.hidden_size, config.qkv_features
        if config.attention_sinks:
            yield _same(f"{prefix}.sinks", (config.num_attention_heads,))
        leaves = {"weight": (width,), **({"bias": ()} if config.qkv_bias else {})}
        if config.fused_qkv:
            for leaf, leaf_shape in leaves.items():
                name = f"{QKV_PROJ}.{leaf}"
                shape = (sum(parts.values()), *leaf_shape)
                yield _renamed(f"{prefix}.{name}", f"{stored}.{name}", shape)
        elif self.merge_qkv:
            for leaf, leaf_shape in leaves.items():
                yield (
                    f"{prefix}.{QKV_PROJ}.{leaf}",
                    _NativeParam(
                        (sum(parts.values()), *leaf_shape),
                        {
                            f"{stored}.{part}.{leaf}": (rows, *leaf_shape)
                            for part, rows in parts.items()
                        },
                    ),
                )
        else:
            for part, rows in parts.items():
                for leaf, leaf_shape in leaves.items():
                    name = f"{part}.{leaf}"
                    yield _renamed(f"{prefix}.{name}", f"{stored}.{name}", (rows, *leaf_shape))
        out = f"{stored_layer}.{config.names.o_proj}"
        outputs = config.num_attention_heads * config.head_dim
        yield from _linear(f"{prefix}.o_proj", out, (width, outputs), config.o_bias)
        if config.qk_norm:
            is_per_head = config.qk_norm_over == "head"
            for norm, name, part in (
                ("q_norm", config.names.q_norm, "q_proj"),
                ("k_norm", config.names.k_norm, "k_proj"),
            ):
                shape = (config.head_dim if is_per_head else parts[part],)
                yield _renamed(f"{prefix}.{norm}.weight", f"{stored}.{name}.weight", shape)

    def _mlp(self, prefix: str, stored: str, inner: int, names: TensorNames) -> Params:
        config = self.config
        up, bias, fused = (inner, config.hidden_size), config.mlp_bias, config.fused_gate_up
        if fused:
            shape, name = (2 * up[0], up[1]), f"{stored}.{names.gate_up_proj}"
            yield from _linear(f"{prefix}.{GATE_UP_PROJ}", name, shape, bias)
        elif config.gated:
            yield from _linear(f"{prefix}.gate_proj", f"{stored}.{names.gate_proj}", up, bias)
        if not fused:
            yield from _linear(f"{prefix}.up_proj", f"{stored}.{names.up_proj}", up, bias)
        yield from _linear(f"{prefix}.down_proj", f"{stored}.{names.down_proj}", up[::-1], bias)

    def _moe(self, layer: str, stored_layer: str, experts: ExpertsConfig) -> Params:
        prefix, names = f"{layer}.mlp", experts.names
        stored = f"{stored_layer}.{names.block}"
        width = self.config.hidden_size
        yield from self._router(prefix, stored, experts)
        yield from self._experts(f"{prefix}.experts", stored, experts)
        if images := experts.of_images:
            yield from self._router(f"{prefix}.{IMAGE_EXPERTS}", stored, images)
            # Files number them on from those of text.
            number = experts.num_experts
            yield from self._experts(f"{prefix}.{IMAGE_EXPERTS}.experts", stored, images, number)
        if experts.shared_intermediate_size:
            shared, inner = f".{names.shared}", experts.shared_intermediate_size
            location = f"{stored}{shared}", inner, SHARED_NAMES
            if names.shared_is_beside:
                location = stored_layer, inner, self.config.names
            yield from self._mlp(f"{prefix}{shared}", *location)
        if experts.shared_gate:
            gate = f".{names.shared_gate}"
            yield from _linear(f"{prefix}{gate}", f"{stored}{gate}", (1, width), bias=False)
        if latent := experts.latent_size:
            shape, bias = (latent, width), self.config.mlp_bias
            for name, projection_shape in (
                (names.latent_in, shape),
                (names.latent_out, shape[::-1]),
            ):
                yield from _linear(f"{prefix}.{name}", f"{stored}.{name}", projection_shape, bias)

    def _router(self, prefix: str, stored: str, experts: ExpertsConfig) -> Params:
        scores, names = (experts.num_experts, self.config.hidden_size), experts.names
        yield from _linear(
            f"{prefix}.gate", f"{stored}.{names.router}", scores, experts.router_bias
        )
        if bias := experts.selection_bias:
            yield _renamed(
                f"{prefix}.gate.{SELECTION_BIAS}", f"{stored}.{names.selection_bias}", bias
            )

    def _experts(self, prefix: str, stored: str, experts: ExpertsConfig, first: int = 0) -> Params:
        # The experts of a layer, whose number in files is from `first` on.
        count, inner, width = (
            experts.num_experts,
            experts.intermediate_size,
            experts.latent_size or self.config.hidden_size,
        )
        names = experts.names
        if experts.is_stacked:
            for matrix, stack, shape in (
                ("gate_up_proj", names.gate_up_stack, (2 * inner, width)),
                ("down_proj", names.down_stack, (width, inner)),
            ):
                matrices = shape[::-1] if experts.is_transposed else shape
                yield _renamed(f"{prefix}.{matrix}", f"{stored}.{stack}", (count, *matrices))
                if experts.clamped:
                    bias = f"{matrix}_bias"
                    yield _renamed(f"{prefix}.{bias}", f"{stored}.{stack}_bias", (count, shape[0]))
            return
        expert_prefixes = [f"{stored}.experts.{number}" for number in range(first, first + count)]
        parts = (names.gate, names.up) if self.config.gated else (names.up,)
        stack = GATE_UP_PROJ if self.config.gated else "up_proj"
        shapes = {
            f"{expert}.{part}.weight": (inner, width)
            for expert in expert_prefixes
            for part in parts
        }
        yield f"{prefix}.{stack}", _NativeParam((count, len(parts) * inner, width), shapes)
        down_shapes = {
            f"{expert}.{names.down}.weight": (width, inner) for expert in expert_prefixes
        }
        yield f"{prefix}.down_proj", _NativeParam((count, width, inner), down_shapes)


def vision_name(native: str) -> str:
    """The checkpoint's name of a parameter or module of the vision part."""
    return BACKBONE + native.removeprefix(VISION)


def _with_backbone(name: str, before: str, after: str) -> str:
    inner = name.removeprefix(f"{before}.")
    return name if inner == name else f"{after}.{inner}"


def _same(name: str, shape: Shape) -> tuple[str, _NativeParam]:
    return _renamed(name, name, shape)


def _renamed(name: str, stored: str, shape: Shape) -> tuple[str, _NativeParam]:
    return name, _NativeParam(shape, {stored: shape})


def _linear(name: str, stored: str, shape: Shape, bias: bool) -> Params:
    yield _renamed(f"{name}.weight", f"{stored}.weight", shape)
    if bias:
        yield _renamed(f"{name}.bias", f"{stored}.bias", shape[:1])
