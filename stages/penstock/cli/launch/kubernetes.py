"""A Kubernetes job for a run: an indexed job with one pod per machine, and its ConfigMap."""

import math
import re
from pathlib import PurePosixPath
from typing import Any

import yaml

from penstock.cli.launch.options import LaunchTarget
from penstock.config.loading import yaml12
from penstock.config.schema.run import RunConfig
from penstock.core.errors import CapabilityError, ConfigError
from penstock.core.process.rendezvous_endpoint import PORT
from penstock.core.remote.urls import is_url, redact

CONFIG_FOLDER = "/etc/penstock"
CONFIG_FILE = "run.yaml"
# After terminationGracePeriodSeconds the kubelet sends SIGKILL: the launcher waits for ranks,
# and then needs time of its own.
MARGIN_SECONDS = 30

# A retry in another pod would hit these errors again, and use up backoffLimit.
NON_RETRYABLE_EXIT_CODES = [ConfigError.exit_code, CapabilityError.exit_code]


def kubernetes_job(run: RunConfig, target: LaunchTarget, *, ranks: int, gpus: int) -> str:
    """YAML for `kubectl apply`: a ConfigMap with the run, a Service for the rendezvous, the Job.

    `ranks` and `gpus` are per pod. Raises ConfigError if results would be lost with a pod,
    or if the config contains credentials.
    """
    _check_storage(run, target)
    name = _name(run)
    parts = [_resource("v1", "ConfigMap", name, data={CONFIG_FILE: _config(run, name, ranks)})]
    if run.launch.nnodes > 1:
        service = {
            # Headless: names lead to the pods themselves, not to an address shared by all of them.
            "clusterIP": "None",
            # Pods have DNS names before they are ready: the others wait for the first one.
            "publishNotReadyAddresses": True,
            "selector": {"job-name": name},
        }
        parts.append(_resource("v1", "Service", name, spec=service))
    parts.append(_resource("batch/v1", "Job", name, spec=_job(run, name, target, gpus)))
    return yaml.dump_all(
        parts, Dumper=_BlockTextDumper, sort_keys=False, allow_unicode=True, width=100
    )


class _BlockTextDumper(yaml.SafeDumper):
    """Writes multi-line strings as block scalars."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_BlockTextDumper.add_representer(str, _represent_text)


def _name(run: RunConfig) -> str:
    """A DNS label with room for the pod's index."""
    plain = re.sub(r"[^a-z0-9]+", "-", run.pipeline.name.lower()).strip("-")
    return f"penstock-{plain}"[:50].rstrip("-") if plain else "penstock"


def _config(run: RunConfig, name: str, ranks: int) -> str:
    """The config as YAML, with the launch settings of the pods."""
    values = run.model_dump(mode="json", exclude_unset=True)
    launch = {**values.get("launch", {}), "nproc_per_node": ranks}
    launch.pop("node_rank", None)
    if run.launch.nnodes > 1:
        launch["rdzv_endpoint"] = f"{name}-0.{name}:{PORT}"
    else:
        launch.pop("rdzv_endpoint", None)
    return yaml12.dump({**values, "launch": launch})


def _job(run: RunConfig, name: str, target: LaunchTarget, gpus: int) -> dict[str, Any]:
    nodes = run.launch.nnodes
    pod: dict[str, Any] = {
        # The only value that goes with a podFailurePolicy.
        "restartPolicy": "Never",
        # On SIGTERM, training finishes its step and saves a checkpoint.
        "terminationGracePeriodSeconds": math.ceil(run.launch.stop_timeout) + MARGIN_SECONDS,
        "containers": [_container(run, target, gpus)],
        "volumes": _volumes(name, target),
    }
    if nodes > 1:
        # The name of the Service: each pod then has the DNS name <job>-<index>.<service>.
        pod["subdomain"] = name
    return {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        # Restarted pods resume from the newest checkpoint.
        "backoffLimit": run.launch.max_restarts * nodes,
        "podFailurePolicy": {
            "rules": [
                {
                    # An eviction or preemption: it does not count towards backoffLimit.
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
                {
                    "action": "FailJob",
                    "onExitCodes": {"operator": "In", "values": NON_RETRYABLE_EXIT_CODES},
                },
            ]
        },
        "template": {"metadata": {"labels": _labels(name)}, "spec": pod},
    }


def _container(run: RunConfig, target: LaunchTarget, gpus: int) -> dict[str, Any]:
    command = ["penstock", "run", f"{CONFIG_FOLDER}/{CONFIG_FILE}"]
    if run.launch.nnodes > 1:
        # Expanded by the kubelet, from the index that an indexed job gives to each pod.
        command.append("--launch.node_rank=$(JOB_COMPLETION_INDEX)")
    mounts = [
        {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    container: dict[str, Any] = {
        "name": "train",
        "image": target.image,
        "command": command,
        "resources": {
            **({"requests": {"cpu": target.cpus}} if target.cpus else {}),
            # For an extended resource such as a GPU, the limit is the request too.
            **({"limits": {"nvidia.com/gpu": gpus}} if gpus else {}),
        },
        "volumeMounts": mounts,
    }
    if target.claim:
        mounts.append({"name": "data", "mountPath": target.mount})
        container["workingDir"] = target.mount
    if target.secret:
        container["envFrom"] = [{"secretRef": {"name": target.secret}}]
    return container


def _volumes(name: str, target: LaunchTarget) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": name}},
        # The default of 64 MB is too small for NCCL and data loader processes.
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    if target.claim:
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": target.claim}})
    return volumes


def _resource(api: str, kind: str, name: str, **content: Any) -> dict[str, Any]:
    metadata = {"name": name, "labels": _labels(name)}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **content}


def _labels(name: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "penstock", "app.kubernetes.io/instance": name}


def _check_storage(run: RunConfig, target: LaunchTarget) -> None:
    """Raise ConfigError if results would be lost with a pod or the config has credentials."""
    for field, value in _string_fields(run.model_dump(mode="json", exclude_unset=True)):
        if redact(value) != value:
            raise ConfigError(
                f"{field} is a URL with a password or a signature, which a ConfigMap would show to "
                "every user who can read it.\n  Write the URL without them, and pass "
                "credentials to the pods with --secret."
            )
    for field, value in {
        "train.output_dir": run.train.output_dir,
        "data.dataset_prepared_path": run.data.dataset_prepared_path,
        "pipeline.artifacts_path": run.pipeline.artifacts_path,
    }.items():
        if is_url(value):
            continue
        if target.claim is None:
            raise ConfigError(
                f"{field} is the folder {value}, which is lost with its pod.\n"
                "  Add --claim NAME of a PersistentVolumeClaim, or write a URL of an object store."
            )
        if not (PurePosixPath(target.mount) / value).is_relative_to(target.mount):
            raise ConfigError(
                f"{field} is {value}, which is not below {target.mount}, where the claim "
                f"{target.claim} is mounted.\n"
                f"  Write a relative path, or mount it elsewhere with --mount."
            )


def _string_fields(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [
            text
            for key, member in value.items()
            for text in _string_fields(member, f"{prefix}.{key}".strip("."))
        ]
    if isinstance(value, list):
        return [
            text
            for index, member in enumerate(value)
            for text in _string_fields(member, f"{prefix}[{index}]")
        ]
    return [(prefix, value)] if isinstance(value, str) else []
