"""What the server's processes import and a plain installation may lack."""

from importlib.util import find_spec

from penstock.core.errors import CapabilityError

PACKAGES = {
    "fastapi": "fastapi",
    "google.protobuf": "protobuf",
    "msgspec": "msgspec",
    "prometheus_client": "prometheus_client",
    "uvicorn": "uvicorn",
    "zmq": "pyzmq",
    "zstandard": "zstandard",
}
"""Modules, and the packages that bring them."""


def require_packages() -> None:
    """Raises CapabilityError naming every package that is not installed."""
    lacking = [package for module, package in PACKAGES.items() if not _is_there(module)]
    if lacking:
        raise CapabilityError(
            f"a training server needs {', '.join(lacking)}, which"
            f" {'is' if len(lacking) == 1 else 'are'} not installed.\n"
            "  Run pip install 'penstock[server]'."
        )


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
