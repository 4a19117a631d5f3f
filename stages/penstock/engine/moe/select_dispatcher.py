"""Select the MoE token dispatcher: all-to-all or DeepEP."""

import socket
from collections.abc import Callable
from importlib.util import find_spec

import torch
import torch.distributed as dist

from penstock.config.schema.run import RunConfig
from penstock.core.errors import CapabilityError
from penstock.engine.distributed.device_mesh import Mesh
from penstock.engine.distributed.expert_parallel import (
    RegisterDispatcher,
    use_all_to_all_dispatcher,
)
from penstock.engine.moe.deepep import DeepEP, open_buffer
from penstock.engine.moe.deepep_requirements import MIN_CAPABILITY, PACKAGE
from penstock.models.decoder_config import DecoderConfig


def select_token_dispatcher(
    run: RunConfig,
    config: DecoderConfig,
    mesh: Mesh,
    device: torch.device,
    notify: Callable[[str], None],
) -> RegisterDispatcher:
    """The dispatcher that `model.ep_dispatch` names; a collective call. Raises CapabilityError if
    this rank does not support it, and ConfigError for too small a buffer."""
    model = run.model
    if model.ep_dispatch == "alltoall":
        return use_all_to_all_dispatcher
    if config.experts is None:
        notify("experts: the model has none, so ep_dispatch deepep changes nothing")
        return use_all_to_all_dispatcher
    if model.deepep_async_combine and not config.experts.shared_intermediate_size:
        notify(
            "experts: the model has no shared ones, which alone could be computed while outputs "
            "return, so deepep_async_combine changes nothing"
        )
    group = mesh.expert_mesh()["expert"].get_group()
    _require(group, device)
    buffer = open_buffer(
        group,
        width=config.experts.latent_size or config.hidden_size,
        gigabytes=model.deepep_buffer_size_gb,
        num_sms=model.deepep_num_sms,
    )
    overlaps = config.experts.shared_intermediate_size and model.deepep_async_combine
    combining = "meanwhile" if overlaps else "at_once"
    return lambda mixture, _, total: DeepEP(buffer, total, combining=combining).register_hooks(
        mixture
    )


def _require(group: dist.ProcessGroup, device: torch.device) -> None:
    """Check this rank too."""
    # The check before the start only sees the launching machine.
    mend = "  Write model.ep_dispatch: alltoall, or leave it out."
    if find_spec(PACKAGE) is None:
        raise CapabilityError(
            f"model.ep_dispatch is deepep, and the package {PACKAGE} is not installed here.\n{mend}"
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        major, minor = torch.cuda.get_device_capability(device)
        raise CapabilityError(
            f"model.ep_dispatch is deepep, which needs a GPU of capability "
            f"{'.'.join(map(str, MIN_CAPABILITY))} or later, and this one has "
            f"{major}.{minor}.\n{mend}"
        )
    hosts: list[str] = [""] * group.size()
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    if len(set(hosts)) > 1:
        raise CapabilityError(
            f"model.ep_dispatch is deepep, which goes over NVLink, and experts are shared by ranks "
            f"on {', '.join(sorted(set(hosts)))}.\n"
            f"  Write train.ep_outside: false, a smaller train.expert_parallel_size, or "
            "model.ep_dispatch: alltoall."
        )
