"""torch.compile per layer (`train.enable_compile`): one compiled graph for all layers of a kind.

Only a layer's own computation is compiled, inside activation checkpointing, FSDP and hooks. The
number of tokens is dynamic, document lengths and expert counts are data, and dropout and observers
are looked up at run time; so other batches, steps and layers do not recompile.
"""

import shutil
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from penstock.core.errors import CapabilityError
from penstock.models.causal_lm import CausalLM
from penstock.models.layers.block import Block
from penstock.models.layers.call_hook import call
from penstock.models.layers.experts import call_experts
from penstock.models.layers.module_registry import OpModule
from penstock.models.layers.moe import ModalityMoE, MoE, dispatch_locally, no_op
from penstock_kernels.group_gemm import group_gemm
from penstock_kernels.op import HAS_TRITON

COMPILERS = ("g++", "clang++")


def require_compiler(device: torch.device, setting: str, instead: str) -> None:
    """Raise CapabilityError if nothing compiles for the device: `setting` needs it, `instead` says
    what to write."""
    # Inductor generates C++ for the CPU and Triton for GPUs.
    if device.type == "cpu":
        if any(map(shutil.which, COMPILERS)):
            return
        missing = f"none of {', '.join(COMPILERS)} is in the PATH"
    elif HAS_TRITON:
        return
    else:
        missing = "Triton is not installed"
    raise CapabilityError(
        f"{setting}, and nothing compiles for {device.type} here: {missing}.\n  {instead}"
    )


def compile_layers(model: CausalLM, device: torch.device) -> None:
    """Compile the layers of a model, or of a part of one; in place.

    A transformer block is one graph if no hooks are registered between its parts and no part is
    sharded separately. Otherwise attention and a feed-forward network are one graph each; and so is
    an MoE layer or, with expert parallelism, its router, its experts and its shared experts. Call
    it after all hooks are registered and the weights are sharded. Raises CapabilityError if nothing
    compiles for the device here.
    """
    require_compiler(device, "train.enable_compile is true", "Leave enable_compile out.")
    for layer in model.blocks:
        assert isinstance(layer, Block)
        for module in layer.modules():
            if isinstance(module, OpModule):
                module.register_op()
        for module in _modules_to_compile(layer):
            # Not the module's call, which runs FSDP's hooks.
            module.forward = torch.compile(module.forward, dynamic=True)


def _modules_to_compile(block: Block) -> Iterator[nn.Module]:
    has_no_hooks = block.run_attn is call and block.run_mlp is call
    networks = [] if block.mlp is None else list(_mlp_modules_to_compile(block.mlp))
    is_one_graph = block.mlp is None or networks == [block.mlp]
    if has_no_hooks and is_one_graph and _is_one_fsdp_unit(block):
        yield block
    else:
        if mixer := block.token_mixer:
            yield mixer
        yield from networks


def _mlp_modules_to_compile(network: nn.Module) -> Iterator[nn.Module]:
    if not isinstance(network, MoE):
        yield network
        return
    experts = network.experts
    # The reference grouped GEMM reads the row count of each expert on the host, MoE activation
    # checkpointing uses saved-tensor hooks, and dropout of rows sets an RNG: none can be compiled.
    compiles_experts = (
        experts.run is call_experts
        and experts.operations.group_gemm is not group_gemm.reference
        and experts.row_dropout is None
    )
    is_local = network.dispatch is dispatch_locally and network.finish_dispatch is no_op
    is_local = is_local and not isinstance(network, ModalityMoE)
    if compiles_experts and is_local and network.run_shared is call and _is_one_fsdp_unit(network):
        yield network
        return
    yield network.gate
    if compiles_experts:
        yield experts
    if network.shared is not None:
        yield network.shared


def _is_one_fsdp_unit(module: nn.Module) -> bool:
    """Whether no part of it is an FSDP unit of its own, with hooks that gather its weights."""
    return not any(isinstance(part, FSDPModule) for part in module.modules() if part is not module)
