"""A word before what is trained changes, so that who still reads it can read it to the end."""

from collections.abc import Callable


class Changes:
    """Those of weights and of what the optimizer keeps. Whoever makes one says so before."""

    def __init__(self) -> None:
        self._readers: list[Callable[[], None]] = []

    def wait_for(self, reader: Callable[[], None]) -> None:
        """Let changes wait until `reader`, which is called before each of them, returns."""
        self._readers.append(reader)

    def begin(self) -> None:
        """To be called before anything that a checkpoint holds is written to; where one reader
        after another has nothing to read it costs nothing."""
        for reader in self._readers:
            reader()
