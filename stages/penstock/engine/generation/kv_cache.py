"""KV cache for generation: the cache, the passes that fill and read it, and attention over it.

T tokens of a pass, B sequences, C token slots per row, K key and value heads, N query heads, H head
width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, chain, count

import torch

from penstock.models.layers.attention import AttentionFn, DecodeSegments, PrefillSegments
from penstock.models.layers.autocast import as_autocast
from penstock_kernels.attention import VarlenMetadata
from penstock_kernels.attention.decode import decode_attention
from penstock_kernels.to_device import to_device

STATES = "states of the current layer"

ALLOCATION_STEP = 64


GatherTokens = Callable[[torch.Tensor], torch.Tensor]
"""Returns all tokens of a pass, given those of this rank."""


class KVCache:
    """The KV cache: one row per sequence, with rows in use first. Layers are identified by the
    order in which their attention runs, which is the same in every pass."""

    def __init__(self, capacity: int) -> None:
        """`capacity` is in tokens over all rows; beyond it no spare memory is allocated."""
        self._capacity = capacity
        self.lengths: list[int] = []
        # The largest number of tokens that any row may reach.
        self.longest = 0
        # The allocated size of every layer: rows, and token slots per row.
        self._rows = self._slots = 0
        self._layers: list[tuple[torch.Tensor, ...]] = []
        # [rows, ...] of each layer that has any: their size does not grow with tokens.
        self._states: list[tuple[torch.Tensor, ...]] = []

    def free(self, row: int) -> None:
        """Free a row. The last row is moved into its place."""
        last = len(self.lengths) - 1
        if row != last:
            length = self.lengths[last]
            for x_BKCH in chain.from_iterable(self._layers):
                x_BKCH[row, :, :length] = x_BKCH[last, :, :length]
            for state in chain.from_iterable(self._states):
                state[row] = state[last]
        self.lengths[row] = self.lengths[last]
        self.lengths.pop()

    def reserve(self) -> None:
        """Allocate enough memory in every layer for `lengths`."""
        rows, longest = len(self.lengths), max(self.lengths)
        if rows <= self._rows and longest <= self._slots:
            return
        # Width allocated for long rows is not kept for many rows, nor the other way round.
        fits = longest <= self._slots <= _round_to_step(self.longest)
        room = longest * 3 // 2 + ALLOCATION_STEP
        room = _round_to_step(max(longest, min(room, self.longest)))
        room = self._slots if fits else room
        # Grow by half each time, so that the total cost of copies stays linear.
        spare = self._rows if rows <= self._rows else rows * 3 // 2 if self._rows else rows
        self._rows, self._slots = max(rows, min(spare, self._capacity // room)), room
        for layer, tensors in enumerate(self._layers):
            sizes = [(self._rows, x.shape[1], self._slots, x.shape[3]) for x in tensors]
            self._layers[layer] = tuple(map(_resize, tensors, sizes))
        for layer, tensors in enumerate(self._states):
            sizes = [(self._rows, *state.shape[1:]) for state in tensors]
            self._states[layer] = tuple(map(_resize, tensors, sizes))

    def layer(self, layer: int, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What a layer has cached of these parts [T, K, H], [B, K, C, H] each: keys and values.
        They are allocated on first use with the device and dtype of the input."""
        if layer == len(self._layers):
            # Zeros: masked values are multiplied by 0 and must be finite.
            self._layers.append(
                tuple(
                    as_autocast(part).new_zeros(
                        (self._rows, part.shape[1], self._slots, part.shape[2])
                    )
                    for part in parts
                )
            )
        return self._layers[layer]

    def states(self, layer: int, like: Sequence[torch.Tensor] = ()) -> tuple[torch.Tensor, ...]:
        """The states of a layer, [rows, ...] each, by its order among those that have any. They are
        allocated on first use `like` the states of documents."""
        if layer == len(self._states):
            self._states.append(
                tuple(tensor.new_zeros((self._rows, *tensor.shape[1:])) for tensor in like)
            )
        return self._states[layer]


@dataclass(frozen=True, eq=False)
class Prefill(PrefillSegments):
    """Prefill: documents of a pass whose keys and values go into the cache."""

    cache: KVCache
    tokens: torch.Tensor
    """int64 [E]: the tokens to cache, once for each row they go to."""
    rows: torch.Tensor
    positions: torch.Tensor
    """int64 [E]: the row of each, and the position in it."""
    gather: GatherTokens
    documents: torch.Tensor
    """int64 [R]: the document of each new row."""
    first_row: int
    calls: "count[int]" = field(default_factory=count)
    state_calls: "count[int]" = field(default_factory=count)

    def store(self, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> None:
        parts = _parts(k_TKH, v_TKH)
        cached = self.cache.layer(next(self.calls), parts)
        for x_BKCH, x_TKH in zip(cached, parts, strict=True):
            # [E, K, H]: of index tensors with a slice between them the dimension comes first.
            x_BKCH[self.rows, :, self.positions] = x_TKH[self.tokens].to(x_BKCH.dtype)

    def store_latents(self, x_S1H: torch.Tensor) -> None:
        """Cache what the heads of the current layer share, of this rank's tokens."""
        x_T1H = self.gather(x_S1H)
        self.store(x_T1H, x_T1H)

    def store_states(self, *states: torch.Tensor) -> None:
        rows = slice(self.first_row, self.first_row + len(self.documents))
        for cached, state in zip(
            self.cache.states(next(self.state_calls), states), states, strict=True
        ):
            cached[rows] = state[self.documents]

    def uncached(self) -> VarlenMetadata:
        return VarlenMetadata(**{field.name: getattr(self, field.name) for field in _PLAIN})


@dataclass(frozen=True, eq=False)
class DecodeStep(DecodeSegments):
    """Decode step: one more token of each row, in order, followed by padding."""

    cache: KVCache
    rows: int
    # Tokens of the shortest and longest row, including the new token.
    shortest: int
    longest: int
    calls: "count[int]" = field(default_factory=count)
    state_calls: "count[int]" = field(default_factory=count)

    def attend(
        self,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        scale: float,
        window: int | None,
        sinks_N: torch.Tensor | None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        """Cache the keys and values of the new tokens, and attend to all of their rows, [T, N, H];
        zeros for padding."""
        rows = self.rows
        # Skip keys that no row sees.
        first = 0 if window is None else max(0, self.shortest - window)
        visible = self._append(_parts(k_TKH, v_TKH), first)
        k_BKCH, v_BKCH = visible[0], visible[-1]
        mask_BC = self._attention_mask(window, first, q_TNH.device)
        y_BNH = decode_attention(
            q_TNH[:rows].to(k_BKCH.dtype), k_BKCH, v_BKCH, mask_BC, scale, sinks_N, soft_cap
        )
        if rows == len(q_TNH):
            return y_BNH
        return torch.cat((y_BNH, torch.zeros_like(q_TNH[rows:], dtype=y_BNH.dtype)))

    def append_latents(self, x_T1H: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Cache what the heads of the current layer share, of the new tokens, and return all."""
        (x_B1CH,) = self._append((x_T1H,))
        return x_B1CH.squeeze(1), self._attention_mask(None, 0, x_T1H.device)

    def states(self) -> tuple[torch.Tensor, ...]:
        every = self.cache.states(next(self.state_calls))
        self.memo[STATES] = tuple(state[: self.rows] for state in every)
        return self.memo[STATES]

    def replace_states(self, *states: torch.Tensor) -> None:
        for cached, state in zip(self.memo[STATES], states, strict=True):
            cached.copy_(state)

    def _append(self, parts: Sequence[torch.Tensor], first: int = 0) -> list[torch.Tensor]:
        shown = self.longest - first
        return [
            self._write_newest(x_BKCH.narrow(0, 0, self.rows), x_TKH).narrow(2, first, shown)
            for x_BKCH, x_TKH in zip(self.cache.layer(next(self.calls), parts), parts, strict=True)
        ]

    def _write_newest(self, x_BKCH: torch.Tensor, x_TKH: torch.Tensor) -> torch.Tensor:
        x_BKH = x_TKH[: self.rows]
        if self.shortest == self.longest:
            # Rows of one length need no index tensors.
            x_BKCH.select(2, self.longest - 1).copy_(x_BKH)
        else:
            rows_B = self._tensor("rows", range(self.rows), x_BKH.device)
            x_BKCH[rows_B, :, self._last_B(x_BKH.device)] = x_BKH.to(x_BKCH.dtype)
        return x_BKCH

    def _attention_mask(
        self, window: int | None, first: int, device: torch.device
    ) -> torch.Tensor | None:
        """The attention mask over keys from `first` on, bool [B, C]; None: all visible."""
        is_narrow = window is not None and window < self.longest - first
        if self.shortest == self.longest and not is_narrow:
            return None
        key = "seen by newest", window
        if key not in self.memo:
            positions_C = torch.arange(first, self.longest, device=device)
            last_B = self._last_B(device)
            mask_BC = positions_C <= last_B[:, None]
            if window is not None:
                mask_BC &= positions_C > last_B[:, None] - window
            self.memo[key] = mask_BC
        return self.memo[key]

    def _last_B(self, device: torch.device) -> torch.Tensor:  # noqa: N802 - B names the dimension
        """The position of each row's newest token."""
        return self._tensor("last", [length - 1 for length in self.cache.lengths], device)

    def _tensor(self, name: str, values: Sequence[int], device: torch.device) -> torch.Tensor:
        if name not in self.memo:
            self.memo[name] = to_device(torch.tensor(values, dtype=torch.int64), device)
        return self.memo[name]


def prefill_segments(
    segments: VarlenMetadata,
    cache: KVCache,
    rows: Sequence[int],
    device: torch.device,
    gather: GatherTokens = lambda x_T: x_T,
) -> VarlenMetadata:
    """Segments of a prefill pass, which fills the KV cache. The first len(rows) documents are
    cached, document i in rows[i] new rows, possibly none."""
    if not any(rows):
        return segments
    starts, first_row = (0, *accumulate(segments.lengths)), len(cache.lengths)
    documents = torch.arange(len(rows)).repeat_interleave(torch.tensor(rows))
    tokens, row_positions, into = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
    for document, copies in enumerate(rows):
        length = segments.lengths[document]
        for _ in range(copies):
            within = torch.arange(length)
            tokens.append(within + starts[document])
            row_positions.append(within)
            into.append(torch.full((length,), len(cache.lengths)))
            cache.lengths.append(length)
    cache.reserve()
    return Prefill(
        **vars(segments),
        cache=cache,
        tokens=to_device(torch.cat(tokens), device),
        rows=to_device(torch.cat(into), device),
        positions=to_device(torch.cat(row_positions), device),
        gather=gather,
        documents=to_device(documents, device),
        first_row=first_row,
    )


def decode_segments(segments: VarlenMetadata, cache: KVCache) -> DecodeStep:
    """Segments of a decode step: one more token of each cache row; updates the cache lengths."""
    lengths = cache.lengths
    lengths[:] = [length + 1 for length in lengths]
    cache.reserve()
    return DecodeStep(
        **vars(segments),
        cache=cache,
        rows=len(lengths),
        shortest=min(lengths),
        longest=max(lengths),
    )


def with_kv_cache(attend: AttentionFn) -> AttentionFn:
    """Wrap `attend` to fill or read the KV cache in prefill and decode passes."""

    def attend_with_cache(
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        segments: VarlenMetadata,
        scale: float,
        window: int | None = None,
        sinks_N: torch.Tensor | None = None,
        soft_cap: float | None = None,
        /,
    ) -> torch.Tensor:
        if isinstance(segments, DecodeStep):
            return segments.attend(q_TNH, k_TKH, v_TKH, scale, window, sinks_N, soft_cap)
        if isinstance(segments, Prefill):
            segments.store(k_TKH, v_TKH)
        return attend(q_TNH, k_TKH, v_TKH, segments, scale, window, sinks_N, soft_cap)

    return attend_with_cache


def _parts(k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (k_TKH,) if v_TKH is k_TKH else (k_TKH, v_TKH)


_PLAIN = fields(VarlenMetadata)


def _resize(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    resized = tensor.new_zeros(shape)
    overlap = tuple(map(slice, map(min, tensor.shape, shape)))
    resized[overlap] = tensor[overlap]
    return resized


def _round_to_step(length: int) -> int:
    return -(-length // ALLOCATION_STEP) * ALLOCATION_STEP
