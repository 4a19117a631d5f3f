"""A step whose imports are done before it begins: `python -m tests.bench.gpu.prestart GO MODULE
ARGUMENTS...` imports the module, waits for the file GO and runs its `main`.

Imports take ten seconds, in which a rented GPU would do nothing: they are done while the step
before measures, on processors that it leaves free.
"""

import sys
import time
from importlib import import_module
from pathlib import Path

import transformers.models.qwen3.modeling_qwen3  # noqa: F401 - most steps need it, and import it late


def main() -> None:
    go, module, *arguments = sys.argv[1:]
    sys.argv = [module, *arguments]
    step = import_module(module)
    while not Path(go).exists():
        time.sleep(0.02)
    step.main()


if __name__ == "__main__":
    main()
