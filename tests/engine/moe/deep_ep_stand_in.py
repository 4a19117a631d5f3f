"""The calls of DeepEP's `Buffer` over gloo: the same arguments and results, and none of its speed.

What is asked for without waiting is not a number before its event is waited for.
"""

from typing import Any

import torch
import torch.distributed as dist


class Config:
    """What kernels for so many ranks need."""

    def __init__(self, num_sms):
        self.num_sms = num_sms

    def get_nvl_buffer_size_hint(self, hidden_bytes, num_ranks):
        return 10_000 * self.num_sms * num_ranks * hidden_bytes


class Event:
    """The end of a call."""

    def __init__(self, log, pending):
        self.log, self.pending = log, pending

    def current_stream_wait(self):
        assert self.pending, "what was waited for at once has no event"
        self.log.append("wait")
        for out, values in self.pending:
            out.copy_(values)


class Buffer:
    """Every rank sends all to all, and each takes what is its own."""

    num_sms = 20
    last = None

    def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0):
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes
        self.log = []
        Buffer.last = self

    @staticmethod
    def set_num_sms(new_num_sms):
        assert new_num_sms % 2 == 0
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks):
        assert num_ranks in (2, 4, 8)
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks):
        return Buffer.get_dispatch_config(num_ranks)

    def get_dispatch_layout(self, topk_idx, num_experts):
        assert topk_idx.dtype == torch.int64
        assert topk_idx.is_contiguous()
        ranks = self.group.size()
        chosen = torch.nn.functional.one_hot(topk_idx, num_experts).sum(1)
        is_sent = chosen.unflatten(1, (ranks, -1)).sum(2) > 0
        return is_sent.sum(0).int(), None, chosen.sum(0).int(), is_sent, Event(self.log, [])

    def dispatch(
        self,
        x,
        handle: Any = None,
        num_tokens_per_rank: Any = None,
        num_tokens_per_rdma_rank: Any = None,
        is_token_in_rank: Any = None,
        num_tokens_per_expert: Any = None,
        topk_idx: Any = None,
        topk_weights: Any = None,
        async_finish=False,
    ):
        assert x.is_contiguous()
        assert num_tokens_per_rdma_rank is None
        self.log.append("dispatch")
        me = self.group.rank()
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            masks = handle
            pieces = self._all(x)
            arrived = torch.cat(
                [piece[mask[:, me]] for piece, mask in zip(pieces, masks, strict=True)]
            )
            out, event = self._given([arrived], async_finish)
            return out[0], None, None, None, None, event
        given = (topk_weights, num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert)
        assert all(isinstance(each, torch.Tensor) for each in given)
        assert topk_weights.dtype == torch.float32
        assert torch.equal(num_tokens_per_rank, is_token_in_rank.sum(0).int())
        here = len(num_tokens_per_expert) // self.group.size()
        everything = self._all((x, topk_idx, topk_weights, is_token_in_rank))
        masks = [piece[3] for piece in everything]
        mine = [
            [part[mask[:, me]] for part in piece[:3]]
            for piece, mask in zip(everything, masks, strict=True)
        ]
        arrived, numbers, weights = (torch.cat(parts) for parts in zip(*mine, strict=True))
        numbers = numbers - here * me
        numbers = numbers.masked_fill((numbers < 0) | (numbers >= here), -1)
        weights = weights.masked_fill(numbers < 0, 0)
        counts = [int((numbers == expert).sum()) for expert in range(here)]
        out, event = self._given([arrived], async_finish)
        return out[0], numbers, weights, counts, masks, event

    def combine(self, x, handle, topk_weights=None, async_finish=False):
        assert x.is_contiguous()
        self.log.append("combine")
        me = self.group.rank()
        results = [self._added(x, handle, me)]
        if topk_weights is not None:
            assert topk_weights.dtype == torch.float32
            results.append(self._added(topk_weights, handle, me))
        out, event = self._given(results, async_finish)
        return out[0], out[1] if len(out) > 1 else None, event

    def _added(self, x, masks, me):
        total = torch.zeros((len(masks[me]), x.shape[1]), dtype=torch.float32)
        for rank, piece in enumerate(self._all(x)):
            first = sum(int(mask[:, rank].sum()) for mask in masks[:me])
            sent = masks[me][:, rank]
            total[sent] += piece[first : first + int(sent.sum())].float()
        return total.to(x.dtype)

    def _all(self, what):
        found = [None] * self.group.size()
        dist.all_gather_object(found, what, group=self.group)
        return found

    def _given(self, values, async_finish):
        if not async_finish:
            return values, Event(self.log, [])
        out = [torch.full_like(value, torch.nan) for value in values]
        return out, Event(self.log, list(zip(out, values, strict=True)))
