"""External process group: broadcasts tensors to processes that are not training ranks.

This process is rank 0 of the group and hosts the store for rendezvous. The others join with torch's
`init_process_group` machinery, which puts `<name>`, `<name>/` and the device type before every key;
SGLang, and projects derived from OpenRLHF, join such a group this way. It is not registered with
torch, so training never waits for it and no group is split from it, and this process can leave it
while other processes still wait in it.
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

NCCL_NO_ABORT_ENV = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""Otherwise NCCL's watchdog and its monitor would end this process for an error of another."""

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes that backends do not support; they are sent as bytes."""


class ExternalProcessGroup:
    """Rank 0 of the group. Call `join` first, in one thread; another thread may call `abandon`."""

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

        Operations that take longer than `seconds` fail, and so does a tensor over gloo that takes
        longer than `tensor_seconds`. Raises OSError if it cannot listen there, or if the address is
        unspecified.
        """
        self._size, self._device, self._address = size, device, address
        self._timeout = datetime.timedelta(seconds=seconds)
        self._tensor_timeout = datetime.timedelta(seconds=tensor_seconds)
        ip = str(socket.getaddrinfo(address, None)[0][4][0])
        if ipaddress.ip_address(ip.partition("%")[0]).is_unspecified:
            # Any machine could write to such a store, and nothing can connect to 0.0.0.0.
            raise OSError(
                "the address is unspecified (all interfaces); write the address of one interface"
            )
        self._server, self.port = listening_store(address, port, timeout=self._timeout, size=size)
        # A separate connection: closing the server ends what waits on this one.
        store = TCPStore(address, self.port, size, timeout=self._timeout, wait_for_workers=False)
        self._store = PrefixStore(
            f"{device.type}/", PrefixStore(f"{name}/", PrefixStore(name, store))
        )
        # Untyped: torch's stubs leave out most of its methods.
        self._backend: Any = None

    @property
    def backend(self) -> str:
        """The backend, by torch's name, that the others must also use."""
        return "nccl" if self._device.type == "cuda" else "gloo"

    def join(self) -> None:
        """Wait until the others have joined, except over NCCL, which connects lazily. Raises
        RuntimeError if they do not join in time, or the group was abandoned meanwhile.
        """
        if self._device.type != "cuda":
            # Options that torch's stubs leave out; by default gloo binds the ranks' interface.
            gloo: Any = dist.ProcessGroupGloo
            own = gloo._Options()
            own._timeout = self._timeout
            own._devices = [gloo.create_device(hostname=self._address)]
            self._backend = gloo(self._store, 0, self._size, own)
            return
        torch.cuda.set_device(self._device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        with env.meanwhile(NCCL_NO_ABORT_ENV):
            self._backend = dist.ProcessGroupNCCL(self._store, 0, self._size, options)

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Broadcast tensors, one after another, and wait for completion. Raises RuntimeError if
        another process is gone or does not receive in time."""
        assert self._backend is not None, "call join first"
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        if self._device.type == "cuda":
            # The current device is a thread's own. NCCL waits for the current stream only, and
            # tensors may have been written on another one.
            torch.cuda.set_device(self._device)
            torch.cuda.synchronize()
        else:
            options.timeout = self._tensor_timeout
        sent = [tensor.contiguous() for tensor in tensors]
        sent = [x.view(torch.uint8) if x.dtype in FP8_DTYPES else x for x in sent]
        works = [self._backend.broadcast([x], options) for x in sent]
        try:
            while works:
                works.pop(0).wait()
        finally:
            # A raised error would keep the works, and those keep the connections open.
            works.clear()
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.shutdown()
        self.close_store()

    def abort(self) -> None:
        """Leave the group at once: operations in progress fail here and for others, soon or by
        timeout. The store stays for late joiners: without it they would retry for minutes.
        """
        # In a thread: gloo cannot cancel a tensor in progress, and waits for its end.
        backend, self._backend = self._backend, None

        def abort_backend() -> None:
            with contextlib.suppress(RuntimeError):
                backend.abort()

        if backend is not None:
            threading.Thread(target=abort_backend, daemon=True).start()

    def close_store(self) -> None:
        """Close the store, so that processes waiting in it for others stop waiting."""
        self._server = None
