"""Hugging Face Hub login check, before any work that needs a token."""

from penstock.core import env
from penstock.core.errors import CapabilityError


def require_login(wanted_by: str) -> None:
    """Raise CapabilityError unless the environment or a login has a Hub token. `wanted_by` is the
    setting that needs the token. The Hub is not asked whether the token is valid."""
    from huggingface_hub import get_token

    if not (env.hub_token() or get_token()):
        raise CapabilityError(
            f"{wanted_by} needs a login to the Hugging Face hub, and there is none.\n"
            "  Log in once with `hf auth login`, or set HF_TOKEN."
        )


def require_hub(wanted_by: str) -> None:
    """Raise CapabilityError if the Hub is disabled (offline mode)."""
    if env.hub_is_offline():
        raise CapabilityError(
            f"{wanted_by} needs the Hugging Face hub, and HF_HUB_OFFLINE is set.\n"
            f"  Unset it, or leave {wanted_by.partition(':')[0]} out."
        )
