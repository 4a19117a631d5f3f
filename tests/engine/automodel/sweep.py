"""Examines model types one after another: `python -m tests.engine.automodel.sweep [TYPE ...]`."""

import sys
import tempfile
import time
import warnings
from pathlib import Path

import transformers

from tests.engine.automodel.examine import examine, write_rows
from tests.engine.automodel.tiny_models import MODEL_TYPES


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    for model_type in sys.argv[1:] or MODEL_TYPES:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            write_rows(Path(folder))
            try:
                found = examine(Path(folder) / "model", model_type)
                faults = "; ".join(found.faults) or "ok"
                told = f"{found.attention} {'packed' if found.packing else 'apart'}"
            except Exception as error:  # noqa: BLE001 - one line in the table
                faults, told = f"{type(error).__name__}: {str(error)[-600:]}".replace("\n", " "), ""
        print(f"{model_type}\t{time.monotonic() - start:.1f}\t{told}\t{faults}", flush=True)


if __name__ == "__main__":
    main()
