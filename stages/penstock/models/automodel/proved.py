"""What was proved of each model type with a tiny model: the results of
`python -m tests.engine.automodel.sweep`, which writes `proved.json`. No torch."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = Path(__file__).with_name("proved.json")


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
            f"    {json.dumps(name)}: {json.dumps(asdict(found))}"
            for name, found in sorted(self.models.items())
        ]
        head = f'  "transformers": "{self.transformers}",\n  "torch": "{self.torch}",\n'
        file.write_text(f"{{\n{head}" + '  "models": {\n' + ",\n".join(lines) + "\n  }\n}\n")

    @classmethod
    def read(cls, file: Path = FILE) -> "ProvedModels":
        """Read the file."""
        found = json.loads(file.read_text())
        models = {name: ProvedModel(**values) for name, values in found["models"].items()}
        return cls(found["transformers"], found["torch"], models)
