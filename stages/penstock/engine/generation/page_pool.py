"""Page pool: which pages of a KV cache are free, which several sequences share, and which hold the
beginning of a prompt that may come again.

Host memory only. All ranks of a replica make the same calls, and so have the same tables.
"""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np

PrefixKey = bytes
"""A digest of all tokens up to the end of a page."""


def prefix_keys(tokens: Sequence[int], page_size: int, salt: bytes = b"") -> list[PrefixKey]:
    """The key of each whole page of a sequence."""
    ids = np.asarray(tokens, dtype=np.int64)
    keys: list[PrefixKey] = []
    parent = salt
    for end in range(page_size, len(ids) + 1, page_size):
        page = ids[end - page_size : end].tobytes()
        parent = hashlib.blake2b(parent + page, digest_size=16).digest()
        keys.append(parent)
    return keys


class PagePool:
    """Pages 0 to count - 1 with reference counts.

    Pages with a prefix key stay findable after their last sequence has ended, until they are
    needed: the least recently released first (vLLM's automatic prefix caching).
    """

    def __init__(self, count: int, *, adjacent: bool) -> None:
        """`adjacent`: prefer pages that extend a table's last run, for backends that read a run of
        consecutive pages at once."""
        self.count = count
        self._references = [0] * count
        self._key_of: dict[int, PrefixKey] = {}
        self._page_of: dict[PrefixKey, int] = {}
        self._reusable: OrderedDict[int, None] = OrderedDict()
        self._free: deque[int] | None = None if adjacent else deque(range(count))
        self._is_free = np.ones(count if adjacent else 0, dtype=bool)
        self._num_free = count

    @property
    def available(self) -> int:
        return self._num_free + len(self._reusable)

    def take(self, after: int | None = None) -> int:
        """A page for one sequence, if possible the one after page `after`.

        Raises:
            IndexError: none is available.
        """
        if not self._num_free:
            page, _ = self._reusable.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
        else:
            self._num_free -= 1
            page = self._free.popleft() if self._free is not None else self._near(after)
        self._references[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more sequence has this page."""
        if not self._references[page]:
            del self._reusable[page]
        self._references[page] += 1

    def release(self, page: int) -> None:
        """One sequence less has this page."""
        self._references[page] -= 1
        if self._references[page]:
            return
        if page in self._key_of:
            self._reusable[page] = None
            return
        self._num_free += 1
        if self._free is None:
            self._is_free[page] = True
        else:
            # Last in, first out: its memory may still be in a cache.
            self._free.appendleft(page)

    def is_shared(self, page: int) -> bool:
        return self._references[page] > 1

    def remember(self, page: int, key: PrefixKey) -> None:
        """The page's tokens are those of this key. The first page of a key stays the one found."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def find(self, key: PrefixKey) -> int | None:
        return self._page_of.get(key)

    def _near(self, after: int | None) -> int:
        if after is not None and after + 1 < self.count and self._is_free[after + 1]:
            page = after + 1
        elif self._is_free.all():
            page = 0
        else:
            # The middle of the longest free run: what is before it can grow too.
            edges = np.flatnonzero(np.diff(self._is_free, prepend=False, append=False))
            starts, ends = edges[::2], edges[1::2]
            longest = int((ends - starts).argmax())
            page = int(starts[longest] + ends[longest]) // 2
        self._is_free[page] = False
        return page
