"""Examines model types one after another, and writes what was proved of each:

python -m tests.engine.automodel.sweep [TYPE ...]

All types take about half an hour on two cores. `penstock models` and docs/models.md show the result
(`python -m tests.engine.automodel.page` writes the page).
"""

import argparse
import re
import tempfile
import time
import warnings
from importlib.metadata import version
from pathlib import Path

import transformers

from penstock.models.automodel.proved import FILE, ProvedModel, ProvedModels
from tests.engine.automodel.examine import examine, write_rows
from tests.engine.automodel.tiny_models import MODEL_TYPES, NOT_BUILT


def prove(model_type: str) -> ProvedModel:
    """Examine a tiny model of this type."""
    if model_type in NOT_BUILT:
        return ProvedModel(reason=NOT_BUILT[model_type])
    with tempfile.TemporaryDirectory() as folder:
        write_rows(Path(folder))
        try:
            found = examine(Path(folder) / "model", model_type)
        except Exception as error:  # noqa: BLE001 - one line in the table
            return ProvedModel(reason=one_line(error))
    return ProvedModel(
        architecture=found.architecture,
        attention=found.attention,
        packing=found.packing,
        head=found.head,
        lora=bool(found.lora_losses),
        reason="; ".join(found.faults),
    )


def one_line(error: Exception) -> str:
    """An error as a reason in the table."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    text = re.sub(r"^rank \d+ of \d+: ", "", lines[0] if lines else "")
    return f"{type(error).__name__}: {text}"[:300]


def main() -> None:
    """Examine the types on the command line, or all, and update the file."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    parser = argparse.ArgumentParser(description="Examine model types of transformers.")
    parser.add_argument("types", nargs="*", choices=[[], *MODEL_TYPES], metavar="TYPE")
    wanted = parser.parse_args().types or MODEL_TYPES
    known = ProvedModels.read().models if FILE.is_file() else {}
    found = {name: one for name, one in known.items() if name in MODEL_TYPES}
    for model_type in wanted:
        start = time.monotonic()
        found[model_type] = prove(model_type)
        seconds = time.monotonic() - start
        print(f"{model_type}\t{seconds:.0f} s\t{found[model_type].reason or 'ok'}", flush=True)
        ProvedModels(version("transformers"), version("torch").partition("+")[0], found).write()


if __name__ == "__main__":
    main()
