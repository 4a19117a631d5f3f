"""Documents that branch: answers to one prompt that share its tokens.

A document is its shared tokens, all of the prompt but the last one, and then its branches. A branch
is the prompt's last token and an answer without its last: so every position has one target. A
branch goes on from the shared tokens as if no other branch lay between. Where prompts are not
shared, a document has one branch, which begins with the whole prompt.

T tokens of some documents that follow each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from penstock.rows.schema import IGNORED

Numbers = npt.NDArray[np.int64]

PER_SAMPLE = 2
"""Branches of a sample, next to each other: the chosen answer and the rejected one; or the judged
answer, and one to another prompt, by which a baseline is estimated."""


@dataclass(frozen=True)
class Span:
    """Neighbouring tokens, up to `end`, that the tokens after them see up to `until`."""

    begin: int
    end: int
    until: int


def first_blind_rows(spans: Sequence[Span]) -> list[int]:
    """For each token the first one that no longer sees it."""
    return [span.until for span in spans for _ in range(span.begin, span.end)]


@dataclass(frozen=True)
class PrefixSharing:
    """How some documents branch, in the order in which they lie."""

    prompts: tuple[int, ...]
    """Shared tokens of each document."""
    branches: tuple[int, ...]
    """Tokens of each branch. All documents have as many."""
    samples: tuple[bytes, ...]
    """A digest of each sample's tokens and labels: the same however rows are made of samples."""
    desirable: tuple[bool, ...] = ()
    """Whether each sample's first branch is a good answer; empty for pairs."""
    score_gaps: tuple[float, ...] = ()
    """By how much the first branch of each is scored higher; empty where answers have no scores."""

    @classmethod
    def joined(cls, parts: Sequence["PrefixSharing"]) -> "PrefixSharing":
        """Those of all parts, one after another."""
        return cls(
            prompts=tuple(each for part in parts for each in part.prompts),
            branches=tuple(each for part in parts for each in part.branches),
            samples=tuple(each for part in parts for each in part.samples),
            desirable=tuple(each for part in parts for each in part.desirable),
            score_gaps=tuple(each for part in parts for each in part.score_gaps),
        )

    @property
    def is_shared(self) -> bool:
        """Whether documents have several branches, which do not see each other."""
        return len(self.branches) > len(self.prompts)

    def documents(self) -> list[int]:
        """Tokens of each document."""
        return self._runs().sum(axis=1).tolist()

    def positions(self) -> Numbers:
        """[T]: those of every branch go on from its prompt's."""
        runs = self._runs()
        begins = np.zeros_like(runs)
        begins[:, 1:] = runs[:, :1]
        firsts = runs.cumsum() - runs.ravel()
        return np.arange(runs.sum()) - np.repeat(firsts - begins.ravel(), runs.ravel())

    def branch_of_tokens(self) -> Numbers:
        """[T]: the number of each token's branch, from 0; -1 for shared ones."""
        runs = self._runs()
        numbers = np.full(runs.shape, -1)
        numbers[:, 1:] = np.arange(len(self.branches)).reshape(len(runs), -1)
        return np.repeat(numbers.ravel(), runs.ravel())

    def sample_of_prompt_tokens(self, labels: Numbers) -> Numbers:
        """[T]: the sample that each token before the first trained one of a first branch is of;
        -1 for all others. `labels` are those of the tokens, [T] or longer."""
        found = np.full(sum(self.documents()), -1)
        begin = branch = 0
        for shared, *branches in self._runs().tolist():
            at = begin + shared
            for size in branches:
                trained = np.flatnonzero(labels[at : at + size] != IGNORED)
                if branch % PER_SAMPLE == 0 and len(trained):
                    found[begin : begin + shared] = branch // PER_SAMPLE
                    found[at : at + trained[0]] = branch // PER_SAMPLE
                at += size
                branch += 1
            begin = at
        return found

    def spans(self) -> list[Span]:
        """The shared tokens of each document, and each of its branches; none is empty."""
        found: list[Span] = []
        begin = 0
        for shared, *branches in self._runs().tolist():
            ends = list(accumulate(branches, initial=begin + shared))
            if shared:
                found.append(Span(begin, ends[0], ends[-1]))
            found += [Span(*pair, pair[1]) for pair in pairwise(ends)]
            begin = ends[-1]
        return found

    def _runs(self) -> Numbers:
        """Tokens of each document that are shared, and of each of its branches: [documents, 1 + of
        a document]."""
        prompts = np.array(self.prompts, dtype=np.int64).reshape(len(self.prompts), 1)
        branches = np.array(self.branches, dtype=np.int64).reshape(len(prompts), -1)
        return np.concatenate([prompts, branches], axis=1)
