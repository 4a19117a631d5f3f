"""Keys and values of sequences that grow token by token, so that each token passes through the
model once: a cache, the passes that fill and read it, and attention that knows them.

T tokens of a pass, B sequences, C tokens that there is room for, K key and value heads, N query
heads, H head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count

import torch

from penstock.models.layers.attention import Attend
from penstock.models.layers.autocast import as_autocast
from penstock_kernels.attention import Segments
from penstock_kernels.attention.newest import newest

STEP = 64
"""Room is made for a multiple of so many tokens."""


class KeyCache:
    """What is kept of each sequence: row by row, the rows in use first.

    Layers are known by the order in which their attention is computed, the same in every pass.
    """

    def __init__(self) -> None:
        self.lengths: list[int] = []
        """Tokens of each row."""
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def drop(self, row: int) -> None:
        """Forget a row. The last one takes its place."""
        last = len(self.lengths) - 1
        if row != last:
            length = self.lengths[last]
            for kept in self._layers:
                for x_BKCH in kept:
                    x_BKCH[row, :, :length] = x_BKCH[last, :, :length]
        self.lengths[row] = self.lengths[last]
        self.lengths.pop()

    def rows_of(self, layer: int, like_TKH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, K, C, H] of a layer, with room for as much as `lengths` say: numbers
        of a device and dtype as they come."""
        rows, longest = len(self.lengths), max(self.lengths)
        if layer == len(self._layers):
            shape = (rows, like_TKH.shape[1], _rounded(longest), like_TKH.shape[2])
            # Zeros: what is hidden is multiplied by nothing, and must be a number.
            self._layers.append((like_TKH.new_zeros(shape), like_TKH.new_zeros(shape)))
        kept = self._layers[layer]
        has_rows, _, has_room, _ = kept[0].shape
        if rows > has_rows or longest > has_room:
            # By half more each time, so that all copies together cost no more than a few.
            rows = max(rows, has_rows if rows <= has_rows else has_rows * 3 // 2)
            room = max(longest, has_room if longest <= has_room else has_room * 3 // 2)
            kept = (_widened(kept[0], rows, room), _widened(kept[1], rows, room))
            self._layers[layer] = kept
        return kept


@dataclass(frozen=True, eq=False)
class Begun(Segments):
    """Documents of which some are kept: their first tokens, all that there are so far."""

    cache: KeyCache
    tokens: torch.Tensor
    """int64 [E]: which of the pass's tokens are kept, once for each row that they go to."""
    rows: torch.Tensor
    """int64 [E]: where each of them goes."""
    places: torch.Tensor
    """int64 [E]: and as which token of the row."""
    calls: "count[int]" = field(default_factory=count)

    def keep(self, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> None:
        """Keys and values of the layer whose turn it is."""
        kept = self.cache.rows_of(next(self.calls), as_autocast(k_TKH))
        for x_BKCH, x_TKH in zip(kept, (k_TKH, v_TKH), strict=True):
            x_BKCH[self.rows, :, self.places] = x_TKH[self.tokens].to(x_BKCH.dtype)


@dataclass(frozen=True, eq=False)
class Continued(Segments):
    """One more token of each row, in order, and padding behind them."""

    cache: KeyCache
    calls: "count[int]" = field(default_factory=count)

    def attend(
        self,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        scale: float,
        window: int | None,
        sinks_N: torch.Tensor | None,
    ) -> torch.Tensor:
        """Keep the tokens' own keys and values, and attend to all of their rows'. [T, N, H]; of
        padding zeros."""
        lengths = self.cache.lengths
        rows = len(lengths)
        kept = self.cache.rows_of(next(self.calls), as_autocast(k_TKH))
        self._keep(kept, (k_TKH[:rows], v_TKH[:rows]))
        # What no row sees is not read.
        first = 0 if window is None else max(0, min(lengths) - window)
        k_BKCH, v_BKCH = (x_BKCH[:rows, :, first : max(lengths)] for x_BKCH in kept)
        sees_BC = self._sees(window, first, q_TNH.device)
        y_BNH = newest(q_TNH[:rows].to(k_BKCH.dtype), k_BKCH, v_BKCH, sees_BC, scale, sinks_N)
        if rows == len(q_TNH):
            return y_BNH
        return torch.cat((y_BNH, torch.zeros_like(q_TNH[rows:], dtype=y_BNH.dtype)))

    def _keep(
        self, kept: tuple[torch.Tensor, torch.Tensor], new: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        lengths = self.cache.lengths
        for x_BKCH, x_BKH in zip(kept, new, strict=True):
            if min(lengths) == max(lengths):
                x_BKCH[: len(lengths), :, lengths[0] - 1] = x_BKH
            else:
                rows_B = self._tensor("rows", range(len(lengths)), x_BKH.device)
                last_B = self._last_B(x_BKH.device)
                x_BKCH[rows_B, :, last_B] = x_BKH.to(x_BKCH.dtype)

    def _sees(self, window: int | None, first: int, device: torch.device) -> torch.Tensor | None:
        """Which of the keys from `first` on each row's token sees; None: all. bool [B, C]."""
        lengths = self.cache.lengths
        is_narrow = window is not None and window < max(lengths) - first
        if min(lengths) == max(lengths) and not is_narrow:
            return None
        key = "seen by newest", window
        if key not in self.kept:
            places_C = torch.arange(first, max(lengths), device=device)
            last_B = self._last_B(device)
            sees_BC = places_C <= last_B[:, None]
            if window is not None:
                sees_BC &= places_C > last_B[:, None] - window
            self.kept[key] = sees_BC
        return self.kept[key]

    def _last_B(self, device: torch.device) -> torch.Tensor:  # noqa: N802 - B names the dimension
        """The place of each row's newest token."""
        return self._tensor("last", [length - 1 for length in self.cache.lengths], device)

    def _tensor(self, name: str, values: Sequence[int], device: torch.device) -> torch.Tensor:
        if name not in self.kept:
            self.kept[name] = torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)
        return self.kept[name]


def begun(
    segments: Segments, cache: KeyCache, rows: Sequence[int], device: torch.device
) -> Segments:
    """The documents of a pass, of which the first len(rows) are kept: number i by rows[i] new rows
    behind those in use, perhaps none."""
    if not any(rows):
        return segments
    starts = (0, *accumulate(segments.lengths))
    tokens: list[torch.Tensor] = []
    into: list[torch.Tensor] = []
    places: list[torch.Tensor] = []
    for document, copies in enumerate(rows):
        length = segments.lengths[document]
        for _ in range(copies):
            within = torch.arange(length)
            tokens.append(within + starts[document])
            places.append(within)
            into.append(torch.full((length,), len(cache.lengths)))
            cache.lengths.append(length)
    return Begun(
        **vars(segments),
        cache=cache,
        tokens=torch.cat(tokens).to(device, non_blocking=True),
        rows=torch.cat(into).to(device, non_blocking=True),
        places=torch.cat(places).to(device, non_blocking=True),
    )


def continued(segments: Segments, cache: KeyCache) -> Continued:
    """One more token of each row of the cache, which takes note of it."""
    cache.lengths[:] = [length + 1 for length in cache.lengths]
    return Continued(**vars(segments), cache=cache)


def keeping(attend: Attend) -> Attend:
    """`attend`, which in passes that fill or read a cache does so."""

    def attend_and_keep(
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        segments: Segments,
        scale: float,
        window: int | None = None,
        sinks_N: torch.Tensor | None = None,
        /,
    ) -> torch.Tensor:
        if isinstance(segments, Continued):
            return segments.attend(q_TNH, k_TKH, v_TKH, scale, window, sinks_N)
        if isinstance(segments, Begun):
            segments.keep(k_TKH, v_TKH)
        return attend(q_TNH, k_TKH, v_TKH, segments, scale, window, sinks_N)

    return attend_and_keep


def _rounded(length: int) -> int:
    return -(-length // STEP) * STEP


def _widened(x_BKCH: torch.Tensor, rows: int, room: int) -> torch.Tensor:
    has_rows, heads, has_room, width = x_BKCH.shape
    wider = x_BKCH.new_zeros((rows, heads, _rounded(room), width))
    wider[:has_rows, :, :has_room] = x_BKCH
    return wider
