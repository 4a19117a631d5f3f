"""`penstock doctor`: checks versions, devices and optional packages, and prints fixes."""

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from packaging.version import Version

from penstock import __version__
from penstock.cli.console import Console, table
from penstock.cli.flow import prefect_api_url
from penstock.core import env
from penstock.core.errors import CapabilityError
from penstock.core.machine import gpu_stack
from penstock.core.remote.prefect_password import TIMEOUT, WITHOUT_PASSWORD, asks_for_password
from penstock.estimate.costs.device_speed import remember, slow_bfloat16

Standing = Literal["ok", "absent", "wrong"]


@dataclass(frozen=True)
class DoctorCheck:
    """The result of one check."""

    subject: str
    standing: Standing
    finding: str
    mend: str = ""

    def as_json(self) -> dict[str, str]:
        """An entry of `doctor --json`."""
        return {
            "what": self.subject,
            "standing": self.standing,
            "seen": self.finding,
            "mend": self.mend,
        }


REQUIRED: dict[str, tuple[str, str | None]] = {
    "torch": ("2.11", None),
    "transformers": ("5.10", None),
    "datasets": ("4.0", None),
    "pyarrow": ("18", None),
    "pydantic": ("2.7", "3"),
    "prefect": ("3.8.8", "4"),
    # Above these, Prefect's server cannot be imported and its schedules never fire.
    "fastapi": ("0.139", "0.151"),
    "sqlalchemy": ("2.0", "2.1"),
}
"""Packages with the minimum version and the first version that is too new."""

OPTIONAL = {
    "peft": "pip install peft, to load exported adapters as adapters",
    "fastokens": "pip install 'penstock[fast]', to tokenize faster, with the same token ids",
    "flash-attn": "pip install flash-attn, on a machine with a CUDA compiler",
    "hf-xet": "pip install hf-xet, for faster pushes to the hub",
    "quack-kernels": "pip install 'penstock[quack]', for model.moe_implementation: quack",
    "deep_ep": "build github.com/deepseek-ai/DeepEP, for model.ep_dispatch: deepep",
    "soundfile": "pip install 'penstock[audio]', for FLAC, MP3 and Ogg, and audio at other rates",
    "av": "pip install 'penstock[video]', for videos",
    "lm_eval": "pip install 'penstock[harness]', for penstock eval --harness",
    "wandb": "pip install 'penstock[wandb]', for train.use_wandb",
    "tensorboard": "pip install 'penstock[tensorboard]', for train.use_tensorboard",
    "mlflow-skinny": "pip install 'penstock[mlflow]', for train.use_mlflow",
    "trackio": "pip install 'penstock[trackio]', for train.use_trackio",
    "prefect-dask": "pip install 'penstock[dask]', for pipeline.task_runner: dask",
    "prefect-ray": "pip install 'penstock[ray]', for pipeline.task_runner: ray",
    "pyzmq": "pip install 'penstock[server]', for penstock serve",
    "s3fs": "pip install 'penstock[s3]', for s3://",
    "gcsfs": "pip install 'penstock[gcs]', for gs://",
    "adlfs": "pip install 'penstock[azure]', for abfs://",
}


def run_checks(console: Console, more: Sequence[DoctorCheck] = ()) -> dict[str, Any]:
    """Print all results. Raises CapabilityError if one of them keeps Penstock from working."""
    findings = [*_check_system(), *check_required(), *check_optional()]
    findings += [*_check_torch(), *_run_probes(), *check_prefect_password(prefect_api_url()), *more]
    rows = [("what", "standing", "seen", "what to do")]
    rows += [(f.subject, f.standing, f.finding, f.mend) for f in findings]
    console.result(table(rows))
    wrong = [finding for finding in findings if finding.standing == "wrong"]
    if wrong:
        mends = "\n".join(f"  {f.subject}: {f.finding}; {f.mend}" for f in wrong)
        raise CapabilityError(f"{len(wrong)} of {len(findings)} findings are wrong:\n{mends}")
    return {"findings": [finding.as_json() for finding in findings]}


def measure_speed() -> list[DoctorCheck]:
    """Measure FLOP/s and memory bandwidth of this machine; stored for `penstock plan`."""
    done = _run_python("-m", "penstock.estimate.costs.measure_machine", PYTHONSAFEPATH="1")
    if done.returncode:
        return [_failed("speed", done, "reinstall torch for this machine")]
    speeds = json.loads(done.stdout.splitlines()[-1])
    name = remember(speeds)
    products = ", ".join(
        f"{speeds[dtype] / 1e9:.3g} GFLOP/s in {dtype}" for dtype in ("bf16", "fp32")
    )
    summary = f"{name}: {products}, memory {speeds['bandwidth'] / 1e9:,.0f} GB/s"
    return [DoctorCheck("speed", "ok", summary, slow_bfloat16() or "")]


def _check_system() -> list[DoctorCheck]:
    gpus = env.num_gpus()
    free = shutil.disk_usage(".").free
    return [
        DoctorCheck("penstock", "ok", __version__),
        DoctorCheck("python", "ok", platform.python_version()),
        DoctorCheck("processors", "ok", str(env.num_processors())),
        DoctorCheck("cuda devices", "ok" if gpus else "absent", str(gpus)),
        _check_tuning_cache(env.cache_home() / "tuning"),
        DoctorCheck("free disk here", "ok" if free > 10e9 else "absent", f"{free / 1e9:.0f} GB"),
    ]


def _check_tuning_cache(folder: Path) -> DoctorCheck:
    """Whether kernels have cached their autotuned tile sizes for a GPU."""
    files = len([*folder.glob("*.json")])
    if files:
        return DoctorCheck("tuned kernels", "ok", f"{files} kinds of GPU, in {folder}")
    return DoctorCheck(
        "tuned kernels", "absent", "none yet", "nothing: first launches on a GPU tune"
    )


def check_required(version_of: Callable[[str], str] = version) -> list[DoctorCheck]:
    """Whether each required package is installed in a supported version.

    `version_of` returns an installed version by name, or raises PackageNotFoundError.
    """
    return [_check_version(package, *bounds, version_of) for package, bounds in REQUIRED.items()]


def _check_version(
    package: str, oldest: str, first_bad: str | None, version_of: Callable[[str], str]
) -> DoctorCheck:
    requirement = f"{package}>={oldest}" + (f",<{first_bad}" if first_bad else "")
    mend = f"pip install '{requirement}'"
    try:
        installed = version_of(package)
    except PackageNotFoundError:
        return DoctorCheck(package, "wrong", "not installed", mend)
    release = Version(installed)
    fits = release >= Version(oldest) and (first_bad is None or release < Version(first_bad))
    return DoctorCheck(package, "ok" if fits else "wrong", installed, "" if fits else mend)


def check_optional(version_of: Callable[[str], str] = version) -> list[DoctorCheck]:
    """Whether packages that only some features need are installed."""
    findings: list[DoctorCheck] = []
    for package, mend in OPTIONAL.items():
        try:
            findings.append(DoctorCheck(package, "ok", version_of(package)))
        except PackageNotFoundError:
            findings.append(DoctorCheck(package, "absent", "not installed", mend))
    return findings


def _check_torch() -> list[DoctorCheck]:
    """What PyTorch sees, and whether the driver, CUDA and Triton fit it."""
    code = """import json, torch
cuda = torch.cuda
gpus = [cuda.get_device_capability(index) for index in range(cuda.device_count())]
print(json.dumps([torch.version.cuda, cuda.get_arch_list() if gpus else [], gpus]))"""
    done = _run_python("-c", code, DO_NOT_TRACK="1")
    if done.returncode:
        return [_failed("torch sees", done, "reinstall torch for this machine")]
    cuda, built, capabilities = json.loads(done.stdout)
    summary = f"CUDA {cuda}, {len(capabilities)} GPUs" if cuda else "CPU only"
    return [DoctorCheck("torch sees", "ok", summary), *check_gpu_stack(cuda, built, capabilities)]


def check_gpu_stack(
    cuda: str | None,
    built: Sequence[str],
    capabilities: Sequence[tuple[int, int]],
    driver: str | None = None,
) -> list[DoctorCheck]:
    """Whether driver, CUDA, PyTorch and Triton work together.

    `cuda` None: PyTorch is built without it. `driver` None: read the loaded one's version.
    """
    driver = driver or gpu_stack.read_driver()
    mismatches = [gpu_stack.check_architectures(built, capabilities), gpu_stack.check_triton()]
    if cuda:
        mismatches.append(gpu_stack.check_driver(cuda, driver))
    if wrong := [mismatch for mismatch in mismatches if mismatch]:
        return [
            DoctorCheck(mismatch.subject, "wrong", mismatch.finding, mismatch.fix)
            for mismatch in wrong
        ]
    if driver is None:
        return [DoctorCheck("NVIDIA driver", "absent", "none is loaded", "nothing, without a GPU")]
    if cuda is None:
        fix = "pip install --force-reinstall torch, whose default wheel for Linux contains CUDA"
        return [DoctorCheck("CUDA in PyTorch", "absent", f"none, beside driver {driver}", fix)]
    return [DoctorCheck("driver, CUDA, Triton", "ok", f"driver {driver}, CUDA {cuda}")]


def _run_python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    # A process of its own: a crash in native code, or an import that fails, is one failed check.
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=env.child_environment(variables),
    )


def _failed(check: str, done: subprocess.CompletedProcess[str], fix: str) -> DoctorCheck:
    # The last line of a traceback is its error.
    last = (done.stderr.strip().splitlines() or ["failed"])[-1]
    return DoctorCheck(check, "wrong", last[:100], fix)


def check_prefect_password(api_url: str) -> list[DoctorCheck]:
    """Whether the Prefect server of this environment, if there is one, asks for a password."""
    if not api_url:
        return []
    check = "prefect's password"
    asks_password = asks_for_password(api_url)
    if asks_password:
        return [DoctorCheck(check, "ok", api_url)]
    unknown = (
        f"gave no answer within {TIMEOUT:g} s that says whether it asks for one; start it, or "
        "correct or unset PREFECT_API_URL"
    )
    mend = f"it {WITHOUT_PASSWORD if asks_password is False else unknown}"
    return [DoctorCheck(check, "absent", api_url, mend)]


def _run_probes() -> list[DoctorCheck]:
    """Whether modules can be imported that break with other packages' versions or names."""
    probes = {
        "prefect's server": (
            "import prefect.server.api.server; print('imports')",
            "pip install 'fastapi>=0.139,<0.151' 'sqlalchemy[asyncio]>=2.0,<2.1'",
        ),
        "hugging face's kernels": (
            "import importlib.util as u; s = u.find_spec('kernels'); print(s.origin if s else '-')",
            "run from a folder without a package called kernels",
        ),
    }
    findings: list[DoctorCheck] = []
    for check, (code, fix) in probes.items():
        done = _run_python("-c", code, DO_NOT_TRACK="1")
        if done.returncode:
            findings.append(_failed(check, done, fix))
        else:
            findings.append(DoctorCheck(check, "ok", done.stdout.strip()))
    return findings
