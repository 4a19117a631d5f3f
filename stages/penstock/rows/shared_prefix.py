"""Prefix sharing: completions of one prompt that share the prompt's tokens.

A document consists of its shared tokens (the prompt without its last token), followed by its
branches. A branch is the prompt's last token and a completion without its last token, so every
position has exactly one target. Each branch attends to the shared tokens but not to other branches,
and its position ids continue from the shared tokens. Without prefix sharing a document has one
branch, which starts with the whole prompt.

T tokens of consecutive documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from penstock.rows.schema import IGNORED

Numbers = npt.NDArray[np.int64]

PER_SAMPLE = 2
"""Consecutive branches per sample: the chosen and the rejected completion; for KTO, the completion
and a mismatched one (of another prompt) for the KL baseline."""


@dataclass(frozen=True)
class Span:
    """Tokens `begin` to `end` are visible to the tokens after them, up to token `until`."""

    begin: int
    end: int
    until: int


def first_blind_rows(spans: Sequence[Span]) -> list[int]:
    """For each token (key), the first later token (query) that no longer attends to it."""
    return [span.until for span in spans for _ in range(span.begin, span.end)]


@dataclass(frozen=True)
class PrefixSharing:
    """Shared prefixes and branches of consecutive documents."""

    prompts: tuple[int, ...]
    """Number of shared tokens of each document."""
    branches: tuple[int, ...]
    """Number of tokens of each branch. All documents have the same number of branches."""
    samples: tuple[bytes, ...]
    """Digest of each sample's tokens and labels; independent of how samples are packed."""
    desirable: tuple[bool, ...] = ()
    """KTO: whether each sample's first branch is desirable; empty for pairs."""
    score_gaps: tuple[float, ...] = ()
    """Chosen score minus rejected score of each pair; empty without scores."""
    image_counts: tuple[int, ...] = ()
    """Number of images of each document, all in tokens before its completions; empty for data
    without images."""

    @classmethod
    def joined(cls, parts: Sequence["PrefixSharing"]) -> "PrefixSharing":
        """Concatenate the documents of all parts."""
        return cls(
            prompts=tuple(prompt for part in parts for prompt in part.prompts),
            branches=tuple(branch for part in parts for branch in part.branches),
            samples=tuple(sample for part in parts for sample in part.samples),
            desirable=tuple(flag for part in parts for flag in part.desirable),
            score_gaps=tuple(score_gap for part in parts for score_gap in part.score_gaps),
            image_counts=tuple(image_count for part in parts for image_count in part.image_counts),
        )

    @property
    def is_shared(self) -> bool:
        """Whether documents have several branches, which do not attend to each other."""
        return len(self.branches) > len(self.prompts)

    def documents(self) -> list[int]:
        """Number of tokens of each document."""
        return self._runs().sum(axis=1).tolist()

    def positions(self) -> Numbers:
        """Position ids, [T]; those of every branch continue from its document's shared tokens."""
        runs = self._runs()
        begins = np.zeros_like(runs)
        begins[:, 1:] = runs[:, :1]
        firsts = runs.cumsum() - runs.ravel()
        return np.arange(runs.sum()) - np.repeat(firsts - begins.ravel(), runs.ravel())

    def branch_of_tokens(self) -> Numbers:
        """Branch index of each token, [T], from 0; -1 for shared tokens."""
        runs = self._runs()
        numbers = np.full(runs.shape, -1)
        numbers[:, 1:] = np.arange(len(self.branches)).reshape(len(runs), -1)
        return np.repeat(numbers.ravel(), runs.ravel())

    def sample_of_prompt_tokens(self, labels: Numbers) -> Numbers:
        """Sample index of each position before the first label of a sample's first branch, [T]; -1
        elsewhere. `labels` are [T] or longer."""
        samples = np.full(sum(self.documents()), -1)
        begin = branch = 0
        for shared, *branches in self._runs().tolist():
            start = begin + shared
            for size in branches:
                trained = np.flatnonzero(labels[start : start + size] != IGNORED)
                if branch % PER_SAMPLE == 0 and len(trained):
                    samples[begin : begin + shared] = branch // PER_SAMPLE
                    samples[start : start + trained[0]] = branch // PER_SAMPLE
                start += size
                branch += 1
            begin = start
        return samples

    def spans(self) -> list[Span]:
        """Visibility spans: the shared tokens of each document, then each of its branches.

        Documents without shared tokens have no span for them.
        """
        spans: list[Span] = []
        begin = 0
        for shared, *branches in self._runs().tolist():
            ends = list(accumulate(branches, initial=begin + shared))
            if shared:
                spans.append(Span(begin, ends[0], ends[-1]))
            spans += [Span(*pair, pair[1]) for pair in pairwise(ends)]
            begin = ends[-1]
        return spans

    def _runs(self) -> Numbers:
        """Number of shared tokens, then of tokens of each branch: [documents, 1 + branches]."""
        prompts = np.array(self.prompts, dtype=np.int64).reshape(len(self.prompts), 1)
        branches = np.array(self.branches, dtype=np.int64).reshape(len(prompts), -1)
        return np.concatenate([prompts, branches], axis=1)
