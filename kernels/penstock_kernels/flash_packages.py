"""The FlashAttention packages, 2 to 4, and whether they are installed.

It imports neither torch nor the packages, because `penstock plan` uses it.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

HOPPER = 9
"""The major number of its CUDA capability."""


@dataclass(frozen=True)
class Package:
    """One of the packages, with the GPUs and head widths that it supports."""

    module: str
    """The module that is imported, or the package that holds it."""
    file: str
    """What is there if the package is, seen from the folder of the module's first name. A name
    alone says little: 2 and 4 share a folder."""
    install: str
    """How to install it."""
    generations: range
    """Major versions of supported CUDA capabilities."""
    widest: int
    """Maximum head width."""
    sinks: bool = False
    soft_cap: bool = True
    """Whether it supports these, in its backward pass too."""

    def missing_reason(self) -> str | None:
        """Why it cannot be imported here; None if it can."""
        spec = find_spec(self.module.split(".", maxsplit=1)[0])
        # find_spec of a submodule would import the package.
        folders = [] if spec is None else [*(spec.submodule_search_locations or ())]
        if spec and spec.origin and not folders:
            folders = [str(Path(spec.origin).parent)]
        if any((Path(folder) / self.file).is_file() for folder in folders):
            return None
        return f"its package is not installed; install it with `{self.install}`"


PACKAGES = {
    "flash_attention_2": Package(
        module="flash_attn",
        file="flash_attn_interface.py",
        install="pip install flash-attn --no-build-isolation",
        generations=range(8, 13),
        widest=256,
    ),
    "flash_attention_3": Package(
        module="flash_attn_interface",
        file="flash_attn_interface.py",
        # PyPI has an empty package of that name.
        install='pip install "git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper"',
        generations=range(HOPPER, HOPPER + 1),
        widest=256,
    ),
    "flash_attention_4": Package(
        module="flash_attn.cute",
        file="cute/interface.py",
        install="pip install --pre flash-attn-4",
        generations=range(HOPPER, 12),
        widest=128,
        sinks=True,
        soft_cap=False,
    ),
}
"""By the names of attention's backends."""
