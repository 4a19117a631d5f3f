"""Autotuning results of one kind of device: a file that all processes on a machine share.

It is read in full, and replaced atomically. A writer holds a lock, and reads the file again first:
so no two processes measure the same, and ranks that start together choose alike. Results of
earlier versions of a kernel, or of Triton, are ignored, and deleted when that kernel is measured
again.
"""

import json
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

FORMAT = 1

Choice = Sequence[int]


class Device(NamedTuple):
    """A kind of device, with its own results."""

    name: str
    capability: tuple[int, int]


class AutotuneKey(NamedTuple):
    """The key of a result."""

    kernel: str
    made_by: str
    """Versions of the kernel and of Triton."""
    inputs: str
    """Kinds and sizes, rounded to classes."""


class AutotuneCache:
    """Results by key, in a folder."""

    def __init__(self, folder: Path, device: Device) -> None:
        name = re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-")
        self.device = device
        self.path = folder / f"{name}-{'.'.join(map(str, device.capability))}.json"
        self._warned = False

    def find(self, key: AutotuneKey) -> Choice | None:
        kernel = self._read().get(key.kernel, {})
        if kernel.get("made_by") != key.made_by:
            return None
        return kernel["choices"].get(key.inputs, {}).get("choice")

    def add(self, key: AutotuneKey, choice: Choice, microseconds: dict[str, float]) -> None:
        """Store a result and its measurements. Call it within `lock`."""
        kernels = self._read()
        kernel = kernels.get(key.kernel, {})
        if kernel.get("made_by") != key.made_by:
            kernel = {"made_by": key.made_by, "choices": {}}
        kernel["choices"][key.inputs] = {
            "choice": list(choice),
            "microseconds": microseconds,
        }
        content = {
            "format": FORMAT,
            "device": self.device.name,
            "capability": list(self.device.capability),
            "kernels": {**kernels, key.kernel: kernel},
        }
        # Renamed over the file, so that a reader sees the old content or the new, never a part.
        # A name of its own: a process without the lock (`lock`) may write at the same time.
        partial = self.path.with_suffix(f".{os.getpid()}.part")
        try:
            partial.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
            partial.replace(self.path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            self._warn(f"cannot be written ({error}); the next process measures again")

    @contextmanager
    def lock(self) -> Iterator[bool]:
        """Lock out other processes; yields False at once if another one measures.

        It must not wait: the other process synchronizes its stream, on which a collective may wait
        for this process.
        """
        lock = FileLock(self.path.with_suffix(".lock"), timeout=0)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except Timeout:
            yield False
            return
        except OSError as error:
            self._warn(f"cannot be locked ({error}); every process measures for itself")
            yield True
            return
        try:
            yield True
        finally:
            lock.release()

    def _read(self) -> dict[str, Any]:
        """The kernels in the file; none if it is missing or unreadable."""
        try:
            content = json.loads(self.path.read_text())
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError) as error:
            self._warn(f"cannot be read ({error}); what it held is measured again")
            return {}
        kernels = content.get("kernels") if isinstance(content, dict) else None
        if not isinstance(kernels, dict) or content.get("format") != FORMAT:
            self._warn(f"is not of format {FORMAT}; what it held is measured again")
            return {}
        well_formed = {
            name: kernel
            for name, kernel in kernels.items()
            if isinstance(kernel, dict)
            and isinstance(kernel.get("choices"), dict)
            and all(isinstance(choice, dict) for choice in kernel["choices"].values())
        }
        if len(well_formed) < len(kernels):
            self._warn("has entries of another form; what they held is measured again")
        return well_formed

    def _warn(self, fault: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"the tuning file {self.path} {fault}", RuntimeWarning, stacklevel=4)
