"""Reference log-probs of completions on disk, keyed by sample content, so that runs can share them.

D samples, A completions of each.
"""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.core.cache.manifest import listed_files
from penstock.core.errors import ArtifactError
from penstock.core.files import atomic_write
from penstock.rows.arrow import binary_array, map_batches, to_arrow, to_numpy
from penstock.rows.schema import DIGEST_BYTES
from penstock.rows.shared_prefix import PER_SAMPLE

Scores = npt.NDArray[np.float64]

FILES = "scores-*.arrow"

SCHEMA = pa.schema(
    [
        pa.field("sample", pa.binary(DIGEST_BYTES), nullable=False),
        pa.field("log_probs", pa.list_(pa.float64(), PER_SAMPLE), nullable=False),
    ]
)
"""One sample per row: its digest, and the summed log-probability of each of its completions."""


class RefLogprobs:
    """The log-probs in all files of a folder."""

    def __init__(self, folder: Path) -> None:
        """Read all files. A missing folder has no log-probs. Raises ArtifactError for a file that
        cannot be read or is damaged."""
        self._at: dict[bytes, int] = {}
        parts: list[Scores] = [np.empty((0, PER_SAMPLE))]
        count = 0
        for file in listed_files(folder, FILES):
            samples, scores = read_scores(file)
            self._at |= {sample: count + index for index, sample in enumerate(samples)}
            parts.append(scores)
            count += len(samples)
        self._scores: Scores = np.concatenate(parts)
        self._folder = folder

    def missing(self, samples: Iterable[bytes]) -> list[bytes]:
        """The samples without log-probs, without duplicates, in the order given."""
        return [sample for sample in dict.fromkeys(samples) if sample not in self._at]

    def get(self, samples: Sequence[bytes]) -> Scores:
        """Log-probs of the samples, [D, A]. Raises ArtifactError if a sample has none."""
        try:
            indices = [self._at[sample] for sample in samples]
        except KeyError as error:
            raise ArtifactError(
                f"{self._folder} has no reference log-probs of sample "
                f"{error.args[0].hex()}.\n  Build it again with --force reference."
            ) from None
        return self._scores[indices]


def read_scores(file: Path) -> tuple[list[bytes], Scores]:
    """Read the samples of a file and their log-probs [D, A]. Raises ArtifactError if the file
    cannot be read or its bytes do not match the digest in its name."""
    _, _, digest = file.stem.removeprefix("scores-").partition("-")
    if digest and digest != _short_digest(file.read_bytes()):
        raise ArtifactError(
            f"{file} is damaged: its bytes do not match their digest.\n"
            "  Restore it from a copy, or delete it."
        )
    batches = map_batches(file)
    samples = [sample for batch in batches for sample in batch.column("sample").to_pylist()]
    parts = [to_numpy(batch.column("log_probs").flatten(), np.float64) for batch in batches]
    return samples, np.concatenate([np.empty(0), *parts]).reshape(-1, PER_SAMPLE)


def write_scores(folder: Path, samples: Sequence[bytes], scores: Scores) -> None:
    """Write the samples' log-probs [D, A] to a file in the folder, atomically.

    The file name is a digest of the samples, so the same samples always give the same file.
    """
    with atomic_write(folder / f"scores-{_samples_digest(samples)}.arrow") as part:
        part.write_bytes(_serialize(samples, scores))


def write_shared_scores(folder: Path, samples: Sequence[bytes], scores: Scores) -> None:
    """Like `write_scores`, for a folder without a manifest: the file name also contains a digest of
    the bytes, so that `read_scores` detects damage."""
    content = _serialize(samples, scores)
    name = f"scores-{_samples_digest(samples)}-{_short_digest(content)}.arrow"
    with atomic_write(folder / name) as part:
        part.write_bytes(content)


def drop_damaged(folder: Path) -> list[Path]:
    """Delete damaged files, whose log-probs can be recomputed, and return their paths."""
    dropped: list[Path] = []
    for file in sorted(folder.glob(FILES)):
        try:
            read_scores(file)
        except ArtifactError:
            # Runs share the folder: another one may have dropped it first.
            file.unlink(missing_ok=True)
            dropped.append(file)
    return dropped


def _serialize(samples: Sequence[bytes], scores: Scores) -> pa.Buffer:
    flat = to_arrow(np.asarray(scores, dtype=np.float64).ravel())
    columns = [
        binary_array(samples, DIGEST_BYTES),
        pa.FixedSizeListArray.from_arrays(flat, PER_SAMPLE),
    ]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, SCHEMA) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
    return sink.getvalue()


def _samples_digest(samples: Sequence[bytes]) -> str:
    return _short_digest(b"".join(samples))


def _short_digest(content: bytes | pa.Buffer) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
