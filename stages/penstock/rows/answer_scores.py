"""What a model makes of answers, by the content of their samples: files that any run can read.

D samples, A answers of each.
"""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.core.errors import ArtifactError
from penstock.core.files import publishing
from penstock.rows.branching import PER_SAMPLE
from penstock.rows.reader import map_batches
from penstock.rows.schema import DIGEST_BYTES

Scores = npt.NDArray[np.float64]

FILES = "scores-*.arrow"

SCHEMA = pa.schema(
    [
        pa.field("sample", pa.binary(DIGEST_BYTES), nullable=False),
        pa.field("log_probs", pa.list_(pa.float64(), PER_SAMPLE), nullable=False),
    ]
)
"""One sample a row: its digest, and the summed log-probability of each of its answers."""


class AnswerScores:
    """The scores in all files of a folder."""

    def __init__(self, folder: Path) -> None:
        """Read them. A folder that is not there holds none. Raises ArtifactError for a file that
        cannot be read."""
        parts = [batch for file in sorted(folder.glob(FILES)) for batch in map_batches(file)]
        table = pa.Table.from_batches(parts, schema=SCHEMA)
        flat = [_viewed(part.column("log_probs")) for part in parts]
        self._scores: Scores = np.concatenate([np.empty((0, PER_SAMPLE)), *flat])
        samples: list[bytes] = table.column("sample").to_pylist()
        self._at = {sample: place for place, sample in enumerate(samples)}
        self._folder = folder

    def missing(self, samples: Iterable[bytes]) -> list[bytes]:
        """Those without scores, each once, in the order in which they come."""
        return [sample for sample in dict.fromkeys(samples) if sample not in self._at]

    def of(self, samples: Sequence[bytes]) -> Scores:
        """Their scores, [D, A]. Raises ArtifactError for a sample that has none."""
        try:
            places = [self._at[sample] for sample in samples]
        except KeyError as error:
            raise ArtifactError(
                f"{self._folder} does not say what the reference model makes of sample "
                f"{error.args[0].hex()}.\n  Build it again with --force reference."
            ) from None
        return self._scores[places]


def write_scores(folder: Path, samples: Sequence[bytes], scores: Scores) -> None:
    """Add a file of these samples' scores [D, A] to the folder, whole or not at all. Its name says
    which samples they are, so that whoever finds the same writes the same file."""
    name = FILES.replace("*", hashlib.sha256(b"".join(samples)).hexdigest()[:16])
    flat = pa.array(np.ascontiguousarray(scores, dtype=np.float64).ravel())
    columns = [
        pa.array(samples, type=SCHEMA.field("sample").type),
        pa.FixedSizeListArray.from_arrays(flat, PER_SAMPLE),
    ]
    with (
        publishing(folder / name) as part,
        pa.OSFile(str(part), "wb") as sink,
        pa.ipc.new_file(sink, SCHEMA) as writer,
    ):
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))


def _viewed(scores: pa.Array) -> Scores:
    """[D, A]. Arrow's own `to_numpy` imports pandas."""
    assert isinstance(scores, pa.FixedSizeListArray)
    flat = scores.flatten()
    _, buffer = flat.buffers()
    if buffer is None:
        return np.empty((0, PER_SAMPLE))
    found = np.frombuffer(buffer, np.float64, count=len(flat), offset=8 * flat.offset)
    return found.reshape(-1, PER_SAMPLE)
