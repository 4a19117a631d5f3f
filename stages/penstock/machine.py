"""What this machine must have for a run: told before any work, with what to write instead."""

from penstock.config.run import RunConfig
from penstock.core import env
from penstock.core.errors import CapabilityError
from penstock.core.login import require_hub, require_login
from penstock.engine.parallel.degrees import accumulation_steps, degrees_of
from penstock.train.torchrun import num_local_ranks


def world_size(run: RunConfig) -> int:
    """Processes that will train: torchrun's, where it runs already, else what `launch` asks for."""
    started = env.rank_variables()
    return started[2] if started else num_local_ranks(run) * run.launch.nnodes


def check_machine(run: RunConfig) -> None:
    """Refuse, before any work, what this machine cannot do or this world cannot be cut into."""
    gpus = env.num_gpus()
    if not gpus and run.model.attn_implementation == "native":
        raise CapabilityError(
            "model.attn_implementation is native, which needs a CUDA device, and there is none.\n"
            "  Write sdpa, or leave it out to get the best there is."
        )
    if not gpus and run.train.init_device == "cuda":
        raise CapabilityError(
            "train.init_device is cuda, and there is no CUDA device.\n"
            "  Write cpu, or leave it out: weights are then made where they are needed."
        )
    asked = run.launch.nproc_per_node
    if gpus and asked != "auto" and asked > gpus:
        raise CapabilityError(
            f"launch.nproc_per_node is {asked}, and {gpus} CUDA devices are visible.\n"
            f"  Write {gpus} or auto."
        )
    degrees = degrees_of(run.train, world_size(run))
    accumulation_steps(run.train, degrees.num_replicas)


def check_hub(run: RunConfig) -> None:
    """Refuse, before any work, what needs the hub or a login to it where there is none."""
    if run.data.hf_use_auth_token:
        require_login("data.hf_use_auth_token: true")
    if run.data.push_dataset_to_hub:
        require_hub("data.push_dataset_to_hub")
