"""A transformers causal language model with the interface of `decoder.Decoder`.

T packed tokens, D model width, V vocabulary; B documents of a padded batch, of L tokens.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.models.automodel.attention import attention_over, keep_documents
from penstock.models.automodel.build import (
    build_config,
    build_meta,
    computed_buffers,
)
from penstock.models.automodel.complete_gradients import (
    complete_gradients,
    complete_part_gradients,
)
from penstock.models.automodel.inputs import accepted, packed_inputs
from penstock.models.automodel.media.cross_attention import blank_image, is_cross_attended
from penstock.models.automodel.media.inputs import media_inputs
from penstock.models.automodel.normalize import normalize
from penstock.models.automodel.outline import AutoModelConfig, Head, Part
from penstock.models.automodel.routers import PaddedObserver, observe_router
from penstock.models.decoder import OutputFn
from penstock.models.layers.attention import AttentionFn
from penstock.models.layers.autocast import as_autocast
from penstock.models.layers.call_hook import CallHook, call
from penstock.models.layers.dropout import current_dropout_rng, dropout_rng
from penstock.models.layers.router_observer import current_observer, observe_routers
from penstock.models.vision.tower import ImageInputs
from penstock_kernels.attention import VarlenMetadata, attention


class ScaledHead(nn.Module):
    """A head whose logits are scaled, then soft-capped: `cap * tanh(scale * head(x) / cap)`."""

    def __init__(self, head: nn.Module, form: Head) -> None:
        super().__init__()
        # In a list, so that the head's parameters are not listed a second time.
        self._head, self.form = [head], form

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        logits_TV = self._head[0](x_TD) * self.form.scale
        cap = self.form.soft_cap
        return logits_TV if cap is None else (logits_TV / cap).tanh() * cap


class AutoCausalLM(nn.Module):
    """Maps packed token ids to logits, or to what `output_fn` returns.

    Its submodules and parameters are those of the transformers model, under the same names. Tied
    parameters stay tied through `to` and `to_empty`. `run_layer` is a call hook around every
    repeated layer.
    """

    merge_qkv = False

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        config: AutoModelConfig,
        *,
        attend: AttentionFn = attention,
    ) -> None:
        """Build the model of a config.json on the meta device."""
        super().__init__()
        model = build_meta(build_config(hf_config), config.outline.traits.attention)
        # In a list, so that the model is not a submodule of itself.
        self._hf = [model]
        self.config, self.attend = config, attend
        self.buffer_values = computed_buffers(model)
        normalize(model)
        for name, module in model.named_children():
            self.add_module(name, module)
        for name, parameter in model.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in model.named_buffers(recurse=False):
            # `normalize` has made parameters of those that checkpoints hold.
            self.register_buffer(name, buffer, persistent=False)
        self._base = [model.base_model]
        self._dropout_seed: int | None = None
        self.has_images = False
        """Whether any document of the run has images."""
        self.run_layer: CallHook = call
        self.blocks = [self.get_submodule(name) for name in config.outline.layers]
        for name in config.outline.routers:
            scoring = config.outline.traits.scoring
            assert scoring
            observe_router(self.get_submodule(name), scoring)
        self.has_experts = any(".experts." in name for name in config.outline.params)
        for number, layer in enumerate(self.blocks):
            # On the instance: nn.Module.__call__ calls it within the hooks of FSDP.
            layer.forward = partial(self._call_layer, number, layer.forward)

    @property
    def is_tied(self) -> bool:
        return bool(self.config.outline.tied)

    @property
    def edges(self) -> tuple[nn.Module | None, nn.Module | None, nn.Module | None]:
        # The embedding, the final norm and the head; none if the norm is not known: the loss may
        # read the head's weight without calling it, and the norm is then called for both.
        outline = self.config.outline
        if not outline.norm or not outline.traits.head:
            return None, None, None
        names = outline.embedding, outline.norm, outline.head
        embedding, norm, head = map(self.get_submodule, names)
        return embedding, norm, head

    def routers(self) -> dict[int, nn.Module]:
        routers = self.config.outline.routers
        return {layer: self.get_submodule(name) for name, layer in routers.items()}

    def fp32_modules(self) -> list[nn.Module]:
        names = {name.rpartition(".")[0] for name in self.config.outline.fp32}
        return [self.get_submodule(name) for name in sorted(names)]

    def forward(
        self,
        inputs: torch.Tensor,
        position_ids_T: torch.Tensor,
        segments: VarlenMetadata,
        output_fn: OutputFn | None = None,
        *,
        images: ImageInputs | None = None,
    ) -> torch.Tensor:
        """Logits [T, V] of token ids [T], or `output_fn(hidden_TD, head)`. `images` are the
        media of a multimodal model."""
        traits = self.config.outline.traits
        self._dropout_seed = self._seed_of_pass()
        seed_dropout(self._dropout_seed)
        rng = current_dropout_rng()
        with (
            attention_over(segments, self.attend),
            dropout_rng(rng and replace(rng, any_rows=True)),
        ):
            if traits.packing:
                y_TD = self._packed(inputs, position_ids_T, segments)
            else:
                y_TD = self._padded(inputs, segments, images)
        if self.config.outline.media:
            y_TD = complete_part_gradients(y_TD, self.image_params)
        if traits.head is None:
            return y_TD if output_fn is None else output_fn(y_TD, nn.Identity())
        y_TD = as_autocast(y_TD)
        head = self.get_submodule(self.config.outline.head)
        head = head if traits.head == Head() else ScaledHead(head, traits.head)
        return head(y_TD) if output_fn is None else output_fn(y_TD, head)

    def _packed(
        self, ids_T: torch.Tensor, position_ids_T: torch.Tensor, segments: VarlenMetadata
    ) -> torch.Tensor:
        """Hidden states [T, D], or logits, of documents as one sequence."""
        return self._run(ids_T[None], packed_inputs(position_ids_T, segments))[0]

    def image_params(self) -> list[nn.Parameter]:
        """The parameters now of the towers and the projector."""
        part = self.config.outline.part
        return [param for name, param in self.named_parameters() if part(name) != "language"]

    def freeze(self, parts: Collection[Part]) -> None:
        """Freeze these parts of a multimodal model, in place."""
        for name, parameter in self.named_parameters():
            if self.config.outline.part(name) in parts:
                parameter.requires_grad_(False)

    def _padded(
        self, ids_T: torch.Tensor, segments: VarlenMetadata, images: ImageInputs | None
    ) -> torch.Tensor:
        """The same of documents as a padded batch."""
        # On the host: reading the longest length from a device would wait for it.
        lengths = torch.tensor(segments.lengths)
        longest = int(lengths.max())
        here_BL = (torch.arange(longest) < lengths[:, None]).to(ids_T.device)
        # masked_scatter fills row by row, which is the order of packed tokens.
        ids_BL = ids_T.new_zeros(here_BL.shape).masked_scatter(here_BL, ids_T)
        observer, rng = current_observer(), current_dropout_rng()
        if rng:
            # Masks of padding change nothing: its outputs are left out below.
            padding_BL = rng.token_indices_T.new_full(here_BL.shape, -1)
            indices_BL = padding_BL.masked_scatter(here_BL, rng.token_indices_T)
            rng = replace(rng, token_indices_T=indices_BL.flatten())
        with observe_routers(observer and PaddedObserver(observer, here_BL)), dropout_rng(rng):
            return self._run(ids_BL, self._known(ids_BL, here_BL, images))[here_BL]

    def _known(
        self, ids_BL: torch.Tensor, here_BL: torch.Tensor, images: ImageInputs | None
    ) -> Mapping[str, Any]:
        traits = self.config.outline.media
        if traits is None:
            return {}
        tensors = images.tensors if images else None
        if tensors is None and self.has_images and is_cross_attended(self._hf[0].config):
            # Ranks call the same layers.
            tensors = blank_image(self._hf[0].config, ids_BL)
        return media_inputs(self._called, ids_BL, here_BL, traits.token_ids, tensors)

    @property
    def _called(self) -> Any:
        # The model without the head, or with it where it is not apart.
        return self._base[0] if self.config.outline.traits.head else self._hf[0]

    def _run(self, ids_BL: torch.Tensor, model_inputs: Mapping[str, Any]) -> torch.Tensor:
        model = self._called
        inputs = accepted(model, {"use_cache": False, "return_dict": True, **model_inputs})
        return model(input_ids=ids_BL, **inputs)[0]

    def _call_layer(
        self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call a layer through the hook, whose first argument is the hidden states."""
        if not args:
            first = next(iter(inspect.signature(forward).parameters))
            args = (kwargs.pop(first),)
        if self.has_experts:
            args = (complete_gradients(args[0], self.blocks[number]), *args[1:])
        seed = None if self._dropout_seed is None else self._dropout_seed + 1 + number

        def run(*args: Any) -> Any:
            seed_dropout(seed)
            return forward(*args, **kwargs)

        return self.run_layer(keep_documents(run), *args)

    def _seed_of_pass(self) -> int | None:
        # The seed of the dropout of a forward pass, from the run's seed, the step and the first
        # token; None without dropout.
        rng = current_dropout_rng()
        if not (self.training and self.config.outline.dropout and rng):
            return None
        # 56 bits: the numbers of layers are added, and manual_seed takes no more than 64.
        return rng.key(f"pass.{int(rng.token_indices_T[0])}") >> 8

    def to_empty(self, *, device: Any, recurse: bool = True) -> "AutoCausalLM":
        super().to_empty(device=device, recurse=recurse)
        # to_empty leaves arbitrary memory in buffers too, such as inv_freq, which no checkpoint
        # restores.
        for name, value in self.buffer_values.items():
            owner, _, leaf = name.rpartition(".")
            module = self.get_submodule(owner)
            if leaf in module._buffers:
                module._buffers[leaf] = value.to(device)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "AutoCausalLM":
        # Move or convert parameters, then tie them again, as `Decoder` does.
        super()._apply(fn, recurse)
        # Those of the model's own module, which torch replaced here and not in `_hf`.
        for name, parameter in self._parameters.items():
            self._hf[0]._parameters[name] = parameter
        for alias, name in self.config.outline.tied.items():
            owner, _, leaf = alias.rpartition(".")
            # torch makes a new Parameter for each module when a model leaves the meta device.
            setattr(self.get_submodule(owner), leaf, self.get_parameter(name))
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        # A replaced child is replaced in the transformers model too.
        super().__setattr__(name, value)
        if isinstance(value, nn.Module) and "_hf" in self.__dict__:
            setattr(self._hf[0], name, value)


def seed_dropout(seed: int | None) -> None:
    """Seed torch's generators, from which the models' dropout draws: a recomputed layer and a
    resumed run then draw the same masks."""
    if seed is not None:
        torch.manual_seed(seed)
