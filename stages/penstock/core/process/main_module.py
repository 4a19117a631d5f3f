"""Start `multiprocessing` processes that do not re-import the caller's `__main__` module.

With the spawn start method, a child imports the parent's `__main__` module. None of our work is
defined there, and a script without `if __name__ == "__main__":` would call `Run.run` again in each
child.
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
    # multiprocessing passes on the __spec__ or __file__ of the main module; an empty one has
    # neither.
    sys.modules[MAIN] = ModuleType(MAIN)
    try:
        yield
    finally:
        sys.modules[MAIN] = main
