"""A group of this process and of processes that are no ranks of ours, to which tensors go out.

This process is its rank 0 and holds the store at which all meet. Others find each other there by
torch's own `init_process_group` machinery, under `<name>`, `<name>/` and the kind of device in
front of every key, which is how SGLang, and what grew out of OpenRLHF, join such a group. It is
none of torch's registered groups, so that nothing of training waits for it or is split off it, and
it can be left while others still hang in it.
"""

import contextlib
import datetime
import ipaddress
import socket
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from penstock.core import env
from penstock.engine.launch.stores import listening_store

ENDS_NOBODY = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""NCCL's watchdog, and whoever watches that, would else end this process for a fault of somebody
else's."""

WITHOUT_NUMBERS = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Types that backends do not know. They go out as the bytes that they are."""


class ExternalProcessGroup:
    """Rank 0 of it. `join` comes first, in one thread; `abandon` may be called in another."""

    def __init__(
        self,
        *,
        name: str,
        address: str,
        port: int,
        size: int,
        device: torch.device,
        seconds: float,
        tensor_seconds: float,
    ) -> None:
        """Listen at `address` and `port` (0: a free one) for the others of `size`.

        Whatever takes longer than `seconds` fails, and so does a tensor over gloo that takes longer
        than `tensor_seconds`. Raises OSError where one cannot listen there, or there is no one
        address.
        """
        self._size, self._device, self._address = size, device, address
        self._timeout = datetime.timedelta(seconds=seconds)
        self._tensor_timeout = datetime.timedelta(seconds=tensor_seconds)
        found = str(socket.getaddrinfo(address, None)[0][4][0])
        if ipaddress.ip_address(found.partition("%")[0]).is_unspecified:
            # Anybody may write to a store, and others could not reach it there.
            raise OSError("that is every address of this machine, and one is wanted")
        self._server, self.port = listening_store(address, port, timeout=self._timeout, size=size)
        # Another connection: where the server goes, what waits at this one ends.
        store = TCPStore(address, self.port, size, timeout=self._timeout, wait_for_workers=False)
        self._store = PrefixStore(
            f"{device.type}/", PrefixStore(f"{name}/", PrefixStore(name, store))
        )
        # Of torch's, whose stubs leave out most of what it does.
        self._backend: Any = None

    @property
    def kind(self) -> str:
        """What torch calls the backend, which the others are to use as well."""
        return "nccl" if self._device.type == "cuda" else "gloo"

    def join(self) -> None:
        """Wait until the others have joined; over NCCL, which connects late, do not wait.

        Raises RuntimeError when they do not come, or the group was abandoned meanwhile.
        """
        if self._device.type != "cuda":
            # Of torch's, whose stubs leave them out; by itself gloo takes the ranks' interface.
            gloo: Any = dist.ProcessGroupGloo
            own = gloo._Options()
            own._timeout = self._timeout
            own._devices = [gloo.create_device(hostname=self._address)]
            self._backend = gloo(self._store, 0, self._size, own)
            return
        torch.cuda.set_device(self._device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        with env.meanwhile(ENDS_NOBODY):
            self._backend = dist.ProcessGroupNCCL(self._store, 0, self._size, options)

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send these to all others, one after another, and wait until they have gone.

        Raises RuntimeError when another one is gone or does not take them in time.
        """
        assert self._backend is not None, "nobody has joined"
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            torch.cuda.synchronize()
        else:
            options.timeout = self._tensor_timeout
        sent = [tensor.contiguous() for tensor in tensors]
        sent = [one.view(torch.uint8) if one.dtype in WITHOUT_NUMBERS else one for one in sent]
        works = [self._backend.broadcast([one], options) for one in sent]
        try:
            while works:
                works.pop(0).wait()
        finally:
            # An error would keep them, and they the connections.
            works.clear()
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        """End a group in which nothing is under way."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.shutdown()
        self.close_store()

    def abandon(self) -> None:
        """Leave at once, whatever is under way: that fails, here and for others, soon or in time.

        Gloo cannot break off a tensor that is under way: a thread sees to its end. The store stays,
        for those who come late: without it they would look for it for minutes.
        """
        backend, self._backend = self._backend, None
        if backend is not None:
            threading.Thread(target=_abort, args=[backend], daemon=True).start()

    def close_store(self) -> None:
        """Whoever waits there for others to come, waits no more."""
        self._server = None


def _abort(backend: Any) -> None:
    with contextlib.suppress(RuntimeError):
        backend.abort()
