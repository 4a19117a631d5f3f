"""Samples that are documents as they are: labels shifted once, and the last one's place empty."""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
import pyarrow as pa

from penstock.rows.bin_plan import Indices
from penstock.rows.prepared import PreparedSamples
from penstock.rows.reader import Tokens
from penstock.rows.schema import IGNORED


@dataclass(frozen=True)
class SFTSamples:
    """The samples of a split, one document each."""

    samples: PreparedSamples
    documents_per_sample: ClassVar[int] = 1

    def sample_lengths(self) -> Indices:
        """Tokens of every sample."""
        return self.samples.lengths()

    def document_lengths(self, chosen: Indices, sizes: Indices) -> Indices:
        """Tokens of every document of the chosen samples, which have these sizes."""
        del chosen
        return sizes

    def write_tokens(
        self,
        chosen: Indices,
        ends: Indices,
        ids: Tokens,
        labels: Tokens,
        begins: Indices | None = None,
    ) -> None:
        """Lay the chosen samples end to end, each ending where `ends` says; or pieces of them,
        which begin at the tokens `begins` of their samples. The last position of a piece has the
        sample's next token as its target, where there is one.

        In the order in which they are stored, so that files are read from front to back.
        """
        samples = self.samples
        sizes = np.diff(ends, prepend=0)
        labels[ends - 1] = IGNORED
        order = np.argsort(chosen)
        stored = samples.stored[""]
        files = np.searchsorted(samples.starts, chosen[order], side="right") - 1
        cuts = np.flatnonzero(np.diff(files, prepend=-1, append=len(stored)))
        to_ids, to_labels = ids.data, labels.data
        for cut, following in pairwise(cuts.tolist()):
            file = int(files[cut])
            some = order[cut:following]
            places = chosen[some] - samples.starts[file]
            offsets = stored[file].offsets
            from_ids, from_labels = stored[file].input_ids.data, stored[file].labels.data
            firsts = offsets[places] + (0 if begins is None else begins[some])
            stops = firsts + sizes[some]
            if (cut := stops < offsets[places + 1]).any():
                labels[ends[some][cut] - 1] = stored[file].labels[stops[cut]]
            spans = zip(firsts.tolist(), stops.tolist(), ends[some].tolist(), strict=True)
            for begin, stop, end in spans:
                start = end - (stop - begin)
                to_ids[start:end] = from_ids[begin:stop]
                # The one shift: a target stands at its cause.
                to_labels[start : end - 1] = from_labels[begin + 1 : stop]

    def extra_columns(self, chosen: Indices, rows: Indices) -> list[pa.Array]:
        """Columns of theirs alone: there are none."""
        del chosen, rows
        return []

    def facts(self, chosen: Indices) -> dict[str, int]:
        """What there is to tell of theirs alone: nothing."""
        del chosen
        return {}
