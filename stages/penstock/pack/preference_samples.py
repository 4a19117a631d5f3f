"""Preference samples in packed rows: two completions per prompt (see `rows.shared_prefix`).

A pair has a chosen and a rejected completion. A KTO sample is paired with a completion of another
prompt, from which the KL divergence is estimated (Ethayarajh et al. 2024, arXiv 2402.01306). The
pairing depends on the stored order of the samples only, not on how they are packed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.core.errors import StageError
from penstock.pack.images import image_columns, image_counts, image_facts
from penstock.pack.settings import PackSettings
from penstock.rows.arrow import Tokens, Weights, binary_array, list_array, to_arrow
from penstock.rows.bin_plan import Indices
from penstock.rows.prepared import PreparedSamples
from penstock.rows.schema import DIGEST_BYTES, IGNORED
from penstock.rows.shared_prefix import PER_SAMPLE


@dataclass(frozen=True)
class PreferenceSamples:
    """The samples of a split: one document each with prefix sharing, else one per completion."""

    samples: PreparedSamples
    settings: PackSettings

    @property
    def share_prompts(self) -> bool:
        """Whether the completions of a sample share the prompt's tokens."""
        return self.settings.share_prompts

    @property
    def documents_per_sample(self) -> int:
        """Number of documents of each sample."""
        return 1 if self.share_prompts else PER_SAMPLE

    def sample_lengths(self) -> Indices:
        """Number of tokens of every sample in a row."""
        return self._shared_lengths + self._branch_lengths.sum(axis=1)

    def document_lengths(self, chosen: Indices, sizes: Indices) -> Indices:
        """Number of tokens of every document of the chosen samples; `sizes` are per sample."""
        return sizes if self.share_prompts else self._branch_lengths[chosen].ravel()

    def write_tokens(
        self,
        chosen: Indices,
        ends: Indices,
        ids: Tokens,
        labels: Tokens,
        weights: Weights | None,
        begins: Indices | None = None,
    ) -> None:
        """Write the documents of the chosen samples one after another; `ends` is the end of each
        sample. Preference samples are never split, so `begins` is None, and have no weights.

        A sample with the prompt p0 p1 p2 and the answers a0 a1 and b0 b1, labels below the tokens:

            with a shared prompt            otherwise
            p0 p1 | p2 a0 | p2 b0           p0 p1 p2 a0 | p0 p1 p2 b0
            -  -    a0 a1   b0 b1           -  -  a0 a1   -  -  b0 b1

        Labels are shifted: each is the token to predict.
        """
        assert begins is None
        assert weights is None
        starts = [0, *ends.tolist()]
        for sample, start in zip(chosen.tolist(), starts, strict=False):
            shared = int(self._shared_lengths[sample])
            prompt_end = int(self._prompt_ends[sample])
            position = start + shared
            ids[start:position] = self._side_tokens(0, sample)[0][:shared]
            labels[start:position] = IGNORED
            for branch in range(PER_SAMPLE):
                side_ids, _ = self._side_tokens(branch, sample)
                answer, targets = self._completion(branch, sample)
                first = position + prompt_end - shared
                end = first + len(answer)
                ids[position : first + 1] = side_ids[shared : prompt_end + 1]
                ids[first + 1 : end] = answer[:-1]
                labels[position:first] = IGNORED
                # The prompt's last token predicts the answer's first; the answer's last token is a
                # label only.
                labels[first:end] = targets
                position = end

    def extra_columns(self, chosen: Indices, rows: Indices) -> list[pa.Array]:
        """Columns of prefix sharing. `rows` are the indices of each row's first sample, then the
        number of samples."""
        documents = self.documents_per_sample
        prompts = np.repeat(self._shared_lengths[chosen], documents).astype(np.int32)
        branches = self._branch_lengths[chosen].ravel().astype(np.int32)
        digests = binary_array([self.digest(sample) for sample in chosen.tolist()], DIGEST_BYTES)
        columns = [
            list_array(rows * documents, to_arrow(prompts)),
            list_array(rows * PER_SAMPLE, to_arrow(branches)),
            list_array(rows, digests),
        ]
        if self._is_kto:
            columns.append(list_array(rows, to_arrow(self._desirable[chosen])))
        if self.samples.is_scored:
            columns.append(list_array(rows, to_arrow(self._score_gaps[chosen])))
        if self.samples.has_images:
            counts = image_counts(self.samples, chosen).repeat(documents).astype(np.int32)
            columns += image_columns(self.samples, chosen, rows, documents)
            columns.append(list_array(rows * documents, to_arrow(counts)))
        return columns

    def facts(self, chosen: Indices) -> dict[str, int]:
        """Number of chosen samples, of tokens that their branches share, and of images."""
        shared = int(self._shared_lengths[chosen].sum())
        images = image_facts(self.samples, chosen)
        return {"samples": len(chosen), "shared_tokens": shared, **images}

    def digest(self, sample: int) -> bytes:
        """Digest of the tokens and labels of the sample's branches, and of its images with what
        processed them."""
        digest = blake2b(digest_size=DIGEST_BYTES)
        digest.update(
            # With the lengths: the tokens alone do not say where the prompt and the answers end.
            np.append(self._prompt_ends[sample], self._completion_lengths[sample]).tobytes()
        )
        for branch in range(PER_SAMPLE):
            ids, _ = self._side_tokens(branch, sample)
            for part in (ids[: self._prompt_ends[sample] + 1], *self._completion(branch, sample)):
                digest.update(part.tobytes())
        images, _ = self.samples.images(sample)
        for part in (*self._processors, *images) if images else ():
            digest.update(part)
        return digest.digest()

    def _side_tokens(self, branch: int, sample: int) -> tuple[Tokens, Tokens]:
        return self.samples.tokens(self._sides[branch], sample)

    def _completion(self, branch: int, sample: int) -> tuple[Tokens, Tokens]:
        of = int(self._kl_partners[sample]) if self._is_kto and branch else sample
        first = int(self._prompt_ends[of]) + 1
        last = first + int(self._completion_lengths[sample, branch])
        ids, labels = self._side_tokens(branch, of)
        return ids[first:last], labels[first:last]

    @cached_property
    def _processors(self) -> list[bytes]:
        return [key.encode() for key in self.samples.processors]

    @property
    def _is_kto(self) -> bool:
        return self.samples.kind == "kto"

    @property
    def _sides(self) -> tuple[str, str]:
        first, *other_sides = self.samples.stored
        return first, (other_sides or [first])[0]

    @cached_property
    def _prompt_ends(self) -> Indices:
        """Index of the prompt's last token in each sample, which predicts both completions."""
        heads = np.min([self.samples.prompt_lengths(side) for side in self._sides], axis=0)
        prompt_ends = np.maximum(heads - 1, 0)
        if not self._is_kto:
            for sample, end in enumerate(prompt_ends.tolist()):
                first, second = (self._side_tokens(side, sample)[0][: end + 1] for side in (0, 1))
                # If truncation removed both prompts, the rest need not have a common prefix.
                if not np.array_equal(first, second):
                    prompt_ends[sample] = 0
        return prompt_ends

    @cached_property
    def _shared_lengths(self) -> Indices:
        return self._prompt_ends if self.share_prompts else np.zeros_like(self._prompt_ends)

    @cached_property
    def _completion_lengths(self) -> Indices:
        """Number of tokens of every sample's two completions, [samples, 2]."""
        lengths = [self.samples.side_lengths(side) for side in self._sides]
        counts = np.stack(lengths, axis=1) - self._prompt_ends[:, None] - 1
        if self._is_kto and len(counts):
            counts[:, 1] = counts[self._kl_partners, 0]
            if self.settings.kl_max_len is not None:
                # Samples of a data set without max_seq_len, and their pairs, may be longer.
                longest = np.maximum(lengths[0], self.settings.kl_max_len)
                counts[:, 1] = np.minimum(counts[:, 1], longest - self._prompt_ends - 1)
        return counts

    @cached_property
    def _branch_lengths(self) -> Indices:
        """Number of tokens of every sample's two branches, [samples, 2]."""
        return (self._prompt_ends - self._shared_lengths)[:, None] + self._completion_lengths

    @cached_property
    def _desirable(self) -> npt.NDArray[np.bool_]:
        return self.samples.desirable()

    @cached_property
    def _score_gaps(self) -> npt.NDArray[np.float32]:
        return self.samples.score_gaps()

    @cached_property
    def _kl_partners(self) -> Indices:
        """For every KTO sample, the sample that provides the mismatched completion."""
        count = len(self.samples)
        if count < PER_SAMPLE:
            raise StageError(
                f"There is only one {self.samples.split} sample of type kto; the KL baseline needs "
                "the answer of another one.\n  Add samples, or raise data.val_set_size."
            )
        if self.settings.kl_pairing == "rotate":
            # The previous sample; for the first of each group of `size` the group's last.
            size = self.settings.kl_rotation_size or count
            partners = np.arange(count) - 1
            firsts = np.arange(0, count, size)
            partners[firsts] = np.minimum(firsts + size, count) - 1
            return partners
        prompts = [
            self._side_tokens(0, sample)[0][: end + 1].tobytes()
            for sample, end in enumerate(self._prompt_ends.tolist())
        ]
        return _pair_with_other_prompts(prompts)


def _pair_with_other_prompts(prompts: Sequence[bytes]) -> Indices:
    """For each sample the nearest previous one, cyclically, with another prompt."""
    count = len(prompts)
    partners = np.arange(count) - 1
    # Two passes, so that the first samples can refer to the last ones.
    for sample in [*range(count)] * 2:
        if prompts[sample] == prompts[sample - 1]:
            partners[sample] = partners[sample - 1]
    partners %= count
    # If all prompts are equal, use the previous sample.
    partners[partners == np.arange(count)] -= 1
    return partners % count
