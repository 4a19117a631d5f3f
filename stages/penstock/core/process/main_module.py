"""Processes of `multiprocessing` that do not run the caller's script.

A process that is spawned imports the script that its parent is running, in case the work is defined
there. Ours never is, and a script without `if __name__ == "__main__":` would start its run anew in
each of them.
"""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType

MAIN = "__main__"


@contextmanager
def without_main_module() -> Generator[None]:
    """Processes that are started inside the block import no `__main__` of this one."""
    main = sys.modules[MAIN]
    sys.modules[MAIN] = ModuleType(MAIN)
    try:
        yield
    finally:
        sys.modules[MAIN] = main
