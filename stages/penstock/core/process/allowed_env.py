"""Environment allowlist for child processes, including which secrets they receive.

A child receives the variables that it needs to run: paths, locale, proxies, and those read by
compilers, CUDA, its libraries and torch. It receives a secret only for one of its purposes. All
other variables are dropped; `launch.pass_env` and a server's `pass_env` add more.
"""

import re
from collections.abc import Collection, Mapping
from typing import Literal

Purpose = Literal["hub", "cloud", "wandb", "mlflow", "trackio"]
"""Purposes of a process that need credentials."""


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _names(
    """
    PATH HOME USER LOGNAME SHELL PWD TERM COLUMNS NO_COLOR FORCE_COLOR HOSTNAME
    LANG LANGUAGE TZ TMPDIR TMP TEMP VIRTUAL_ENV
    HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY http_proxy https_proxy all_proxy no_proxy
    SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE
    CC CXX CFLAGS CXXFLAGS LDFLAGS CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH LIBRARY_PATH MAX_JOBS
    DO_NOT_TRACK SOURCE_DATE_EPOCH XORL_DATASET_NUM_PROC
    """
)
PREFIXES = _names(
    """
    LC_ XDG_ PYTHON PENSTOCK_ CONDA_ MAMBA_ LD_ DYLD_ COVERAGE_ COV_CORE_ PYTEST_ MALLOC_ JEMALLOC_
    OMP_ GOMP_ KMP_ MKL_ ATEN_ ONEDNN_ DNNL_ OPENBLAS_ BLIS_ VECLIB_ NUMEXPR_ RAYON_
    CUDA NVIDIA_ NV_ NVTE_ NVSHMEM_ NVRTC_ CUBLAS CUDNN_ CUTLASS_ NCCL_ GLOO_ RCCL_ UCC_ UCX_
    HIP_ ROCM_ ROCR_ ROCBLAS_ HIPBLASLT_ MIOPEN_ HSA_ GPU_ XLA_ TPU_ XPU_ SYCL_ ZE_ ONEAPI_
    FI_ RDMAV_ IBV_ MLX4_ MLX5_ EFA_ OFI_ PMI PMIX_ OMPI_ MPI_ PSM2_ PSM3_
    TORCH PYTORCH_ TRITON_ FLASH_ATTENTION_ DEEP_EP_ DEEPEP_ FLA_ TILELANG_
    HF_ HUGGINGFACE_ TRANSFORMERS_ DATASETS_ TOKENIZERS_ ACCELERATE_ SAFETENSORS_
    SLURM PREFECT__
    """
)
# Name suffixes that are dropped although the name has one of PREFIXES.
SECRET = re.compile(
    r"(^|_)(TOKEN(_PATH)?|(?<!MAX_)(?<!MIN_)(?<!NUM_)TOKENS|KEYS?|SECRETS?|PASSWORD|PASSWD"
    r"|PASSPHRASE|PAT|JWT|CREDENTIALS?|CONNECTION_STRING|SAS)(_ID)?$|._PWD$|^NETRC$",
    re.IGNORECASE,
)

PURPOSE_PREFIXES: Mapping[Purpose, tuple[str, ...]] = {
    "hub": ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN"),
    "cloud": ("AWS_", "BOTO_", "GOOGLE_", "GCLOUD_", "GCS_", "CLOUDSDK_", "GCE_", "AZURE_"),
    "wandb": ("WANDB_", "NETRC"),
    "mlflow": ("MLFLOW_", "DATABRICKS_"),
    "trackio": ("TRACKIO_", "HF_TOKEN"),
}
"""Name prefixes that are passed only for a purpose."""


def is_allowed(name: str, purposes: Collection[Purpose] = (), more: Collection[str] = ()) -> bool:
    """Whether a child with these purposes receives the variable; `more` adds names."""
    if name in more or matches_purpose(name, purposes):
        return True
    return not SECRET.search(name) and (name in NAMES or name.startswith(PREFIXES))


def matches_purpose(name: str, purposes: Collection[Purpose]) -> bool:
    """Whether the variable belongs to one of these purposes."""
    return any(name.startswith(PURPOSE_PREFIXES[purpose]) for purpose in purposes)


def is_secret(name: str) -> bool:
    """Whether the variable's name marks it as a credential."""
    return bool(SECRET.search(name))


def is_private(name: str) -> bool:
    """Whether the variable is withheld from some processes: a credential, or an account setting."""
    return is_secret(name) or any(map(name.startswith, PURPOSE_PREFIXES.values()))
