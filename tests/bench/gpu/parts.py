"""What `make gpu` runs, in order of worth."""

import sys
from dataclasses import dataclass

PART_SECONDS = 9 * 60
"""The longest that a part may take."""


@dataclass(frozen=True)
class Step:
    """A command of a part."""

    name: str
    command: tuple[str, ...]
    """Arguments of Python."""
    seconds: int
    """How long it may take on a GPU."""
    dry: tuple[str, ...] | None = None
    """The same on a CPU, at sizes that say nothing of speed; None: `command` with `--dry`."""

    @property
    def has_main(self) -> bool:
        """Whether it is a benchmark's module, whose `main` may be called."""
        return self.command[0] == "-m" and self.command[1].startswith("tests.")

    def arguments(self, *, dry: bool) -> list[str]:
        """The command line."""
        if not dry:
            return [sys.executable, *self.command]
        return [sys.executable, *(self.dry or (*self.command, "--dry"))]


@dataclass(frozen=True)
class Part:
    """Some nine minutes at most."""

    letter: str
    title: str
    steps: tuple[Step, ...]


def _bench(name: str, seconds: int, *arguments: str, module: str = "") -> Step:
    return Step(name, ("-m", f"tests.bench.{module or name}", *arguments), seconds)


def _gpu(name: str, seconds: int, *arguments: str) -> Step:
    title = " ".join((name, *(one.lstrip("-") for one in arguments)))
    return _bench(title, seconds, *arguments, module=f"gpu.{name}")


def _kernels(name: str, seconds: int, *arguments: str) -> Step:
    title = " ".join((name, *(one.lstrip("-") for one in arguments)))
    return _bench(title, seconds, *arguments, module=f"kernels.bench_{name}")


PARTS = (
    Part("a", "Environment and NCCL", (_gpu("environment", 60), _gpu("nccl", 120))),
    Part(
        "b",
        "Kernels against their references, compiled",
        (
            Step(
                "kernel tests",
                ("-m", "pytest", "tests/kernels", "-q", "-n", "8", "--maxfail", "40"),
                420,
                ("-m", "pytest", "tests/kernels/test_philox.py", "-q", "-n", "0"),
            ),
            Step(
                "gpu tests",
                ("-m", "pytest", "tests", "-q", "-m", "gpu", "-n", "4"),
                110,
                ("-m", "pytest", "tests/kernels/attention/test_flex.py", "-q", "-n", "0"),
            ),
        ),
    ),
    Part("c", "A step of every family, GPU against CPU", (_gpu("parity", 420),)),
    Part(
        "d",
        "Qwen3-8B beside transformers with Liger-Kernel",
        (
            _bench("adapters", 260, "--case", "adapters", module="bench_gpu"),
            _bench("weights", 260, "--case", "weights", module="bench_gpu"),
        ),
    ),
    Part(
        "e",
        "Where a step's time goes; models with experts",
        (
            _gpu("profile", 150, "--case", "adapters"),
            _gpu("profile", 150, "--case", "weights"),
            _gpu("experts", 240),
        ),
    ),
    Part(
        "f",
        "Kernels beside their peers",
        (
            _kernels("elementwise", 90),
            _kernels("loss", 90),
            _kernels("attention", 90, "--alone"),
            _kernels("group_gemm", 120),
            _kernels("optimizers", 60),
            _kernels("loss", 90, "--tokens", "32768"),
        ),
    ),
    Part(
        "g",
        "Quantized and fp8 matrices, rows of experts; memory of QLoRA",
        (
            _kernels("quant", 120),
            _kernels("fp8", 120),
            _kernels("moves", 60),
            _gpu("qlora", 240),
        ),
    ),
    Part(
        "h",
        "Generation, reinforcement learning through the server, checkpoints",
        (_gpu("generation", 150), _gpu("server", 180), _gpu("checkpoints", 200)),
    ),
)
