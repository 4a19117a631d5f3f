"""What was proved of each model type with a tiny model: the results of
`python -m tests.engine.automodel.sweep`, which writes `proved.json`. No torch."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("proved.json")
IMAGE_FILE = Path(__file__).with_name("proved_images.json")
"""Of image-text models: the results of `python -m tests.engine.automodel.sweep_images`."""
AUDIO_FILE = Path(__file__).with_name("proved_audio.json")
"""Of models that take audio, by the same sweep."""


@dataclass(frozen=True)
class ProvedModel:
    """The result of one model type."""

    architecture: str = ""
    attention: str = ""
    """As in `outline.Traits`."""
    packing: bool = False
    head: bool = False
    lora: bool = False
    """Whether there are linear layers for adapters."""
    reason: str = ""
    """Why the type cannot be trained; empty: everything holds (see docs/models.md)."""


@dataclass(frozen=True)
class ProvedModels:
    """The results, and the versions that they were found with."""

    transformers: str
    torch: str
    models: Mapping[str, ProvedModel]

    def write(self, file: Path = FILE) -> None:
        """Write the file, one line for each model type."""
        lines = [
            f"    {json.dumps(name)}: {json.dumps(asdict(proof))}"
            for name, proof in sorted(self.models.items())
        ]
        head = f'  "transformers": "{self.transformers}",\n  "torch": "{self.torch}",\n'
        file.write_text(
            f"{{\n{head}" + '  "models": {\n' + ",\n".join(lines) + "\n  }\n}\n", encoding="utf-8"
        )

    @classmethod
    def read(cls, file: Path = FILE) -> "ProvedModels":
        content = json.loads(file.read_text(encoding="utf-8"))
        models = {name: ProvedModel(**values) for name, values in content["models"].items()}
        return cls(content["transformers"], content["torch"], models)


@cache
def image_types() -> frozenset[str]:
    """The image-text types that are proved."""
    return _proved(IMAGE_FILE)


@cache
def audio_types() -> frozenset[str]:
    """The types that are proved with audio."""
    return _proved(AUDIO_FILE)


def _proved(file: Path) -> frozenset[str]:
    models = ProvedModels.read(file).models
    return frozenset(name for name, model in models.items() if not model.reason)
