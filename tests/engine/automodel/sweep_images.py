"""Examines types with images and audio one after another, and writes what was proved of each:

python -m tests.engine.automodel.sweep_images [TYPE ...]

All types take about a quarter of an hour on two cores. docs/models.md shows the result.
"""

import argparse
import tempfile
import time
import warnings
from importlib.metadata import version
from pathlib import Path

import transformers

from penstock.models.automodel.proved import AUDIO_FILE, IMAGE_FILE, ProvedModel, ProvedModels
from tests.engine.automodel.examine_images import examine
from tests.engine.automodel.sweep import one_line
from tests.engine.automodel.tiny_images import AUDIO_EXAMINED, IMAGE_TYPES, NOT_BUILT, WITH_AUDIO


def prove(model_type: str) -> ProvedModel:
    """Examine a tiny model of this type."""
    if model_type in NOT_BUILT and model_type not in AUDIO_EXAMINED:
        return ProvedModel(reason=NOT_BUILT[model_type])
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = examine(Path(folder) / model_type, model_type)
        except Exception as error:  # noqa: BLE001 - one line in the table
            return ProvedModel(reason=one_line(error))
    return ProvedModel(
        architecture=found.architecture,
        attention=found.attention,
        head=found.head,
        lora=bool(found.lora_losses),
        reason="; ".join(found.faults),
    )


def main() -> None:
    """Examine the types on the command line, or all, and update the file."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description="Examine types with images or audio.")
    parser.add_argument(
        "types", nargs="*", choices=[[], *IMAGE_TYPES, *AUDIO_EXAMINED], metavar="TYPE"
    )
    for model_type in parser.parse_args().types or [*IMAGE_TYPES, *AUDIO_EXAMINED]:
        file = AUDIO_FILE if model_type in AUDIO_EXAMINED else IMAGE_FILE
        known = dict(ProvedModels.read(file).models) if file.is_file() else {}
        start = time.monotonic()
        found = prove(model_type)
        seconds = time.monotonic() - start
        print(f"{model_type}\t{seconds:.0f} s\t{found.reason or 'ok'}", flush=True)
        known[model_type.removesuffix(WITH_AUDIO)] = found
        versions = version("transformers"), version("torch").partition("+")[0]
        ProvedModels(*versions, known).write(file)


if __name__ == "__main__":
    main()
