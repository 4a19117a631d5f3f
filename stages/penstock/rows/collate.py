"""Packed rows to a micro-batch of tensors. T tokens in all, padding included."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from penstock.rows.reader import Row
from penstock.rows.schema import IGNORED


@dataclass(frozen=True)
class MicroBatch:
    """Documents one after another, with no batch dimension.

    `lengths` say where documents end and sum to T; padding is a last document of its own.
    `labels_T` are shifted already and -100 where nothing is trained, in all of the padding too.
    """

    input_ids_T: torch.Tensor  # noqa: N815 - T names the dimension
    labels_T: torch.Tensor  # noqa: N815 - T names the dimension
    position_ids_T: torch.Tensor  # noqa: N815 - T names the dimension
    lengths: tuple[int, ...]
    num_tokens: int
    """Tokens without padding."""
    num_trained: int

    def pin_memory(self) -> "MicroBatch":
        """The same in page-locked memory, from which a GPU copies while it computes."""
        return replace(
            self,
            input_ids_T=self.input_ids_T.pin_memory(),
            labels_T=self.labels_T.pin_memory(),
            position_ids_T=self.position_ids_T.pin_memory(),
        )


def collate(
    rows: Sequence[Row],
    *,
    pad_to_multiple_of: int,
    pad_token_id: int = 0,
    device: torch.device | str | None = None,
) -> MicroBatch:
    """Lay rows end to end and pad to the next multiple; no rows give one whole row of padding.

    Tensors are int64 of shape [T]. Labels are taken as they are, never shifted again.
    """
    lengths = [int(length) for row in rows for length in row.lengths]
    used = sum(lengths)
    held = sum(len(row.input_ids) for row in rows)
    if held != used:
        raise ValueError(f"the rows hold {held} tokens, but their lengths sum to {used}")
    padding = -used % pad_to_multiple_of if used else pad_to_multiple_of
    total = used + padding
    input_ids = np.full(total, pad_token_id, dtype=np.int64)
    labels = np.full(total, IGNORED, dtype=np.int64)
    start = 0
    for row in rows:
        end = start + len(row.input_ids)
        input_ids[start:end] = row.input_ids
        labels[start:end] = row.labels
        start = end
    if padding:
        lengths.append(padding)
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(total, dtype=np.int64) - np.repeat(starts, lengths)
    return MicroBatch(
        input_ids_T=torch.from_numpy(input_ids).to(device),
        labels_T=torch.from_numpy(labels).to(device),
        position_ids_T=torch.from_numpy(positions).to(device),
        lengths=tuple(lengths),
        num_tokens=used,
        num_trained=int((labels != IGNORED).sum()),
    )
