"""Whether there is a login for the Hugging Face hub, asked before any work that needs one."""

from penstock.core import env
from penstock.core.errors import CapabilityError


def require_login(wanted_by: str) -> None:
    """Raise CapabilityError unless the environment or a login holds a token for the hub.

    `wanted_by` is the setting that needs one. Whether the hub takes the token is not asked here.
    """
    from huggingface_hub import get_token

    if not (env.hub_token() or get_token()):
        raise CapabilityError(
            f"{wanted_by} needs a login to the Hugging Face hub, and there is none.\n"
            "  Log in once with `hf auth login`, or set HF_TOKEN."
        )


def require_hub(wanted_by: str) -> None:
    """Raise CapabilityError where the hub may not be used."""
    if env.hub_is_offline():
        raise CapabilityError(
            f"{wanted_by} needs the Hugging Face hub, and HF_HUB_OFFLINE is set.\n"
            f"  Unset it, or leave {wanted_by.partition(':')[0]} out."
        )
