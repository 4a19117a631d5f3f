"""What `make gpu` runs, in order of worth."""

import sys
from dataclasses import dataclass

PART_SECONDS = 3 * 60
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
    """Three minutes at most."""

    letter: str
    title: str
    steps: tuple[Step, ...]


def _bench(name: str, seconds: int, *arguments: str, module: str = "") -> Step:
    return Step(name, ("-m", f"tests.bench.{module or name}", *arguments), seconds)


def _gpu(name: str, seconds: int, *arguments: str) -> Step:
    title = " ".join((name, *(one.lstrip("-") for one in arguments)))
    return _bench(title, seconds, *arguments, module=f"gpu.{name}")


def _tests(name: str, seconds: int, paths: str, *, dry: str, marks: str = "") -> Step:
    """Tests of these paths; without a GPU those of one file."""
    of = ("-m", marks) if marks else ()
    return Step(
        name,
        ("-m", "pytest", *paths.split(), "-q", *of, "-n", "8", "--maxfail", "40"),
        seconds,
        ("-m", "pytest", dry, "-q", "-n", "0"),
    )


def _kernels(name: str, seconds: int, *arguments: str) -> Step:
    title = " ".join((name, *(one.lstrip("-") for one in arguments)))
    return _bench(title, seconds, *arguments, module=f"kernels.bench_{name}")


PARTS = (
    Part(
        "a",
        "Where a step's time goes",
        (_gpu("profile", 90, "--case", "adapters"), _gpu("profile", 90, "--case", "weights")),
    ),
    Part("b", "Attention over packed documents", (_kernels("attention", 120, "--alone"),)),
    Part("c", "Grouped products", (_kernels("group_gemm", 150),)),
    Part("d", "Generation", (_gpu("generation", 180),)),
    Part(
        "e",
        "Models with experts",
        (_gpu("experts", 75), _gpu("experts", 105, "--accumulate", "8")),
    ),
    Part("f", "Optimizers and the loss", (_kernels("optimizers", 60), _kernels("loss", 120))),
    Part(
        "g",
        "Qwen3-8B beside transformers with Liger-Kernel",
        (
            _bench("adapters", 90, "--case", "adapters", module="bench_gpu"),
            _bench("weights", 90, "--case", "weights", module="bench_gpu"),
        ),
    ),
    Part(
        "h",
        "Environment, NCCL, norms and gates",
        (_gpu("environment", 30), _gpu("nccl", 60), _kernels("elementwise", 90)),
    ),
    Part("i", "Float8 and quantized matrices", (_kernels("fp8", 60), _kernels("quant", 120))),
    Part(
        "j",
        "The loss of more tokens, rows of experts",
        (_kernels("loss", 120, "--tokens", "32768"), _kernels("moves", 60)),
    ),
    Part("k", "Memory of QLoRA", (_gpu("qlora", 180),)),
    Part("l", "Reinforcement learning through the server", (_gpu("server", 180),)),
    Part("m", "Checkpoints", (_gpu("checkpoints", 180),)),
    Part("n", "A step of every family, GPU against CPU", (_gpu("parity", 180),)),
    Part(
        "o",
        "Kernels of attention against their references, compiled",
        (
            _tests(
                "attention tests",
                180,
                "tests/kernels/attention tests/kernels/linear_attention",
                dry="tests/kernels/test_op.py",
            ),
        ),
    ),
    Part(
        "p",
        "Kernels of products against their references, compiled",
        (
            _tests(
                "product tests",
                180,
                "tests/kernels/moe tests/kernels/quant",
                dry="tests/kernels/test_philox.py",
            ),
        ),
    ),
    Part(
        "q",
        "Other kernels against their references, compiled",
        (
            _tests(
                "kernel tests",
                180,
                "tests/kernels --ignore=tests/kernels/attention --ignore=tests/kernels/moe "
                "--ignore=tests/kernels/quant --ignore=tests/kernels/linear_attention",
                dry="tests/kernels/test_tuning.py",
            ),
        ),
    ),
    Part(
        "r",
        "Tests that run on a GPU alone",
        (
            _tests(
                "gpu tests", 180, "tests", dry="tests/kernels/attention/test_flex.py", marks="gpu"
            ),
        ),
    ),
)
