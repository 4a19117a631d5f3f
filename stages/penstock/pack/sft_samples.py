"""SFT samples in packed rows: one document each, with labels shifted by one."""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
import pyarrow as pa

from penstock.pack.images import image_columns, image_facts
from penstock.rows.arrow import Tokens, Weights
from penstock.rows.bin_plan import Indices
from penstock.rows.prepared import PreparedSamples
from penstock.rows.schema import IGNORED


@dataclass(frozen=True)
class SFTSamples:
    """The samples of a split, one document each."""

    samples: PreparedSamples
    documents_per_sample: ClassVar[int] = 1

    def sample_lengths(self) -> Indices:
        """Number of tokens of every sample."""
        return self.samples.lengths()

    def document_lengths(self, chosen: Indices, sizes: Indices) -> Indices:
        """Number of tokens of every document: that of the sample."""
        del chosen
        return sizes

    def write_tokens(
        self,
        chosen: Indices,
        ends: Indices,
        ids: Tokens,
        labels: Tokens,
        weights: Weights | None,
        begins: Indices | None = None,
    ) -> None:
        """Write the chosen samples one after another; `ends` is the end of each. With `begins`,
        write pieces that start at these tokens of their samples. The target of a piece's last
        position is the sample's next token, if there is one. `weights` are written for samples
        that differ in their loss weights; labels that weigh 0 are ignored.

        Copies in stored order, so that files are read sequentially.
        """
        samples = self.samples
        sizes = np.diff(ends, prepend=0)
        labels[ends - 1] = IGNORED
        order = np.argsort(chosen)
        stored = samples.stored[""]
        files = np.searchsorted(samples.starts, chosen[order], side="right") - 1
        cuts = np.flatnonzero(np.diff(files, prepend=-1, append=len(stored)))
        # Memoryviews: slicing arrays costs more than copying a short sample.
        to_ids, to_labels = ids.data, labels.data
        for cut, following in pairwise(cuts.tolist()):
            file = int(files[cut])
            some = order[cut:following]
            positions = chosen[some] - samples.starts[file]
            offsets = stored[file].offsets
            from_ids, from_labels = stored[file].input_ids.data, stored[file].labels.data
            firsts = offsets[positions] + (0 if begins is None else begins[some])
            stops = firsts + sizes[some]
            if (cut := stops < offsets[positions + 1]).any():
                labels[ends[some][cut] - 1] = stored[file].labels[stops[cut]]
            spans = zip(firsts.tolist(), stops.tolist(), ends[some].tolist(), strict=True)
            for begin, stop, end in spans:
                start = end - (stop - begin)
                to_ids[start:end] = from_ids[begin:stop]
                # Shift labels: position t has the label of token t + 1.
                to_labels[start : end - 1] = from_labels[begin + 1 : stop]
        if weights is not None:
            # The buffers are those of earlier batches, and may be longer than these samples.
            used = slice(0, int(ends[-1]))
            self._write_weights(chosen, ends, weights[used], begins)
            weights[used][labels[used] == IGNORED] = 0
            labels[used][weights[used] == 0] = IGNORED

    def _write_weights(
        self, chosen: Indices, ends: Indices, weights: Weights, begins: Indices | None
    ) -> None:
        """Write the loss weight of the token that follows each position of its sample."""
        samples, stored = self.samples, self.samples.stored[""]
        sizes = np.diff(ends, prepend=0)
        files = np.searchsorted(samples.starts, chosen, side="right") - 1
        order = np.argsort(files, kind="stable")
        weights[:] = 1
        for some in np.split(order, np.flatnonzero(np.diff(files[order])) + 1):
            file, lengths = int(files[some[0]]), sizes[some]
            lists = stored[file]
            if lists.weights is None:
                continue
            within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            firsts = lists.offsets[chosen[some] - samples.starts[file]] + 1
            firsts = firsts + (0 if begins is None else begins[some])
            # The last token of a sample has no target, so what it weighs does not matter.
            sources = np.minimum(np.repeat(firsts, lengths) + within, len(lists.weights) - 1)
            weights[np.repeat(ends[some] - lengths, lengths) + within] = lists.weights[sources]
        weights *= np.repeat(samples.source_weights()[chosen], sizes)

    def extra_columns(self, chosen: Indices, rows: Indices) -> list[pa.Array]:
        """The images of each row, for data with images. `rows` are the indices of each row's first
        sample, then the number of samples."""
        return image_columns(self.samples, chosen, rows)

    def facts(self, chosen: Indices) -> dict[str, int]:
        """Number of images of the chosen samples, and of their tokens."""
        return image_facts(self.samples, chosen)
