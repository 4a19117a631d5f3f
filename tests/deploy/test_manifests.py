"""Manifests hold together: what one part names another has, nothing secret, nothing unpinned."""

import asyncio
import json
import re
import shutil
import subprocess

import pytest
import yaml
from prefect.events.schemas.automations import AutomationCore, EventTrigger

from penstock.config.schema.pipeline import LaunchConfig
from tests.conftest import ROOT
from tests.deploy.shell import commands_of, fault_of, simple_commands
from tests.flows.conftest import scripts

# pyright: reportMissingImports=false

__all__ = ["scripts"]

DEPLOY = ROOT / "deploy"
FILES = {
    path.name: list(yaml.safe_load_all(path.read_text()))
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
}
OBJECTS = [each for name, found in FILES.items() for each in found if name != "kustomization.yaml"]
[KUSTOMIZATION] = FILES["kustomization.yaml"]
COMPOSE, GPU = (
    yaml.safe_load((DEPLOY / name).read_text()) for name in ("compose.yaml", "compose.gpu.yaml")
)
TEMPLATE = json.loads((DEPLOY / "kubernetes" / "work-pool.json").read_text())
PINNED = re.compile(r"[\w./-]+:\d+(\.\d+)+[\w.-]*")
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|AUTH_STRING$|_KEY$")


def named(kind):
    return {each["metadata"]["name"]: each for each in OBJECTS if each["kind"] == kind}


def pods():
    for each in OBJECTS:
        if "template" in each.get("spec", {}):
            yield each["metadata"]["name"], each["spec"]["template"]
    yield "a flow run", TEMPLATE["job_configuration"]["job_manifest"]["spec"]["template"]


PODS = dict(pods())


def test_compose_pins_images_and_binds_ports_to_this_machine_and_writes_no_secret():
    services = COMPOSE["services"]
    ours = {"${PENSTOCK_IMAGE:-penstock:cpu}", "${PENSTOCK_IMAGE:-penstock:cuda}"}
    for name, service in services.items():
        assert service["image"] in ours or PINNED.fullmatch(service["image"])
        assert service["image"] not in ours or service["cap_drop"] == ["ALL"]
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:")
        for variable, value in service.get("environment", {}).items():
            assert not SECRET.search(variable) or value.startswith("${"), (name, variable)
        for mounted in service.get("volumes", ()):
            assert mounted.split(":")[0] in COMPOSE["volumes"]
        for other, when in service.get("depends_on", {}).items():
            needed = {"service_healthy": "healthcheck", "service_completed_successfully": "command"}
            assert needed[when["condition"]] in services[other]
    assert set(GPU["services"]) == {
        name for name, service in services.items() if service["image"] in ours
    }


def test_the_image_is_pinned_and_unprivileged_and_made_of_what_the_build_may_see():
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    steps = [line.split() for line in text.splitlines() if line and line[0] not in "# "]
    assert re.search(r"^ARG PYTHON=\d+\.\d+\.\d+-", text, re.M)
    assert {step[1] for step in steps if step[0] == "FROM"} == {"python:${PYTHON}"}
    *_, user = [step[1] for step in steps if step[0] == "USER"]
    uids = {pod["spec"]["securityContext"]["runAsUser"] for pod in PODS.values()}
    assert int(user.split(":")[0]) in uids
    words = [word for step in steps if step[0] in ("ARG", "ENV") for word in step[1:]]
    assert [word for word in words if SECRET.search(word.split("=")[0])] == []
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    assert allowed[1] == "*"
    for step in steps:
        if step[0] == "COPY" and "--from=build" not in step:
            for source in step[1:-1]:
                assert f"!{source}" in allowed
                assert (ROOT / source).exists()


@pytest.mark.parametrize("name", PODS)
def test_pods_have_no_rights_and_their_images_are_pinned(name):
    spec = PODS[name]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    tags = {image["name"]: image["newTag"] for image in KUSTOMIZATION["images"]}
    for container in spec["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        image = container["image"]
        default = TEMPLATE["variables"]["properties"]["image"]["default"]
        image = {"{{ image }}": default, "penstock": f"penstock:{tags['penstock']}"}.get(
            image, image
        )
        assert PINNED.fullmatch(image)
        for variable in container["env"] if isinstance(container["env"], list) else ():
            assert not SECRET.search(variable["name"]) or (
                "valueFrom" in variable or variable["name"].endswith(("SECRET_NAME", "SECRET_KEY"))
            )


def test_what_a_pod_mounts_and_whom_a_service_selects_is_there():
    claims = {*named("PersistentVolumeClaim"), "{{ claim }}"}
    made = {each["name"] for each in KUSTOMIZATION["configMapGenerator"]}
    for template in PODS.values():
        spec = template["spec"]
        volumes = {each["name"]: each for each in spec.get("volumes", ())}
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims
            if "configMap" in volume:
                assert volume["configMap"]["name"] in made
        if account := spec.get("serviceAccountName"):
            assert account in named("ServiceAccount")
        for container in spec["containers"]:
            mounted = {each["name"] for each in container.get("volumeMounts", ())}
            assert mounted <= {*volumes, "database"}
            ports = {each["name"] for each in container.get("ports", ())}
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                asked = container.get(probe, {}).get("httpGet", {"port": None})["port"]
                assert asked in {*ports, None}
    assert TEMPLATE["variables"]["properties"]["claim"]["default"] in claims
    labels = [template.get("metadata", {}).get("labels", {}).items() for template in PODS.values()]
    for service in named("Service").values():
        wanted = service["spec"]["selector"].items()
        assert sum(wanted <= found for found in labels) == 1
    [binding] = named("RoleBinding").values()
    assert binding["roleRef"]["name"] in named("Role")
    assert binding["subjects"][0]["name"] in named("ServiceAccount")
    assert set(KUSTOMIZATION["resources"]) == set(FILES) - {"kustomization.yaml"}


def test_hosts_and_pools_that_one_part_names_are_those_of_another():
    services = set(named("Service"))
    text = " ".join((DEPLOY / "kubernetes" / name).read_text() for name in FILES)
    assert set(re.findall(r"http://([\w-]+):4200", text)) <= {*services, "localhost"}
    assert set(re.findall(r"_HOST\n +value: (\S+)", text)) <= services
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    [pool] = {each["work_pool"]["name"] for each in deployments}
    started = [
        *(service["command"] for service in COMPOSE["services"].values() if "command" in service),
        *(c.get("command", []) for pod in PODS.values() for c in pod["spec"]["containers"]),
    ]
    served = [
        word.removeprefix("--pool=")
        for command in started
        for word in command
        if word.startswith("--pool=")
    ]
    assert served == [pool, pool]
    commands = [command[command.index("prefect") :] for command in started if "prefect" in command]
    assert len(commands) == 4
    assert [fault for command in commands if (fault := fault_of(command))] == []


def test_whoever_starts_or_speaks_to_a_server_has_its_password_and_pages_of_others_are_not_named():
    services = COMPOSE["services"]
    environments = {name: each.get("environment", {}) for name, each in services.items()}
    for name, pod in PODS.items():
        for container in pod["spec"]["containers"]:
            if isinstance(container["env"], list):
                environments[name] = {each["name"]: each for each in container["env"]}
    servers = [each for each in environments.values() if "PREFECT_SERVER_UI_API_URL" in each]
    clients = [each for each in environments.values() if "PREFECT_API_URL" in each]
    assert (len(servers), len(clients)) == (2, 4)
    passwords = [each["PREFECT_SERVER_API_AUTH_STRING"] for each in servers]
    passwords += [each["PREFECT_API_AUTH_STRING"] for each in clients]
    for password in passwords:
        if isinstance(password, dict):
            assert password["valueFrom"]["secretKeyRef"] == {"name": "penstock-api", "key": "auth"}
        else:
            assert password.startswith("${PREFECT_API_AUTH_STRING:?")
    for each in servers:
        assert "*" not in str(each["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"])
    unit = (DEPLOY / "systemd" / "penstock-server.service").read_text()
    assert "${PREFECT_SERVER_API_AUTH_STRING:?" in unit


def test_scripts_and_units_start_what_there_is():
    scripts = [DEPLOY / "setup.sh", DEPLOY / "slurm" / "worker.sbatch"]
    for path in scripts:
        subprocess.run(["bash", "-n", str(path)], check=True)
    # In setup.sh an option stands or falls with its argument.
    texts = [re.sub(r"\$\{2:\+(.*?)\}", r"\1", path.read_text()) for path in scripts]
    texts += re.findall(
        r"ExecStart=(.*)",
        "".join(path.read_text() for path in sorted((DEPLOY / "systemd").glob("*.service"))),
    )
    found = [command for text in texts for command in simple_commands(text) if command]
    ours = [command[command.index("prefect") :] for command in found if "prefect" in command]
    assert len(ours) == 7
    assert [fault for command in ours if (fault := fault_of(command))] == []
    assert list(commands_of("```sh\ntrue\n```")) == [["true"]]


def test_a_flow_run_on_kubernetes_has_all_it_names_and_the_time_to_save():
    text = json.dumps(TEMPLATE["job_configuration"])
    assert set(re.findall(r"\{\{ (\w+) \}\}", text)) == set(TEMPLATE["variables"]["properties"])
    spec = PODS["a flow run"]["spec"]
    assert spec["terminationGracePeriodSeconds"] > LaunchConfig().stop_timeout
    assert spec["containers"][0]["workingDir"] == "/data"


@pytest.mark.usefixtures("scripts")
def test_automations_are_ones_and_a_run_that_ended_in_any_way_is_not_called_crashed():
    import recurring

    made = {
        automation.name: automation
        for path in sorted((DEPLOY / "automations").glob("*.yaml"))
        for automation in map(
            AutomationCore.model_validate, yaml.safe_load(path.read_text())["automations"]
        )
    }
    assert len(made) == 4
    watch = made["Penstock runs without heartbeat are crashed"].trigger
    assert isinstance(watch, EventTrigger)
    ours = (ROOT / "flows" / "finetune.py").read_text()
    ends = {*recurring.STATES.values(), *re.findall(r'Cancelled\(name="(\w+)"', ours)}
    ends |= {"Completed", "Failed", "Crashed", "Cancelled", "TimedOut"}
    assert {f"prefect.flow-run.{name}" for name in ends} <= watch.expect
    # Heartbeats come every three minutes, and one may be lost.
    assert watch.within
    assert watch.within.total_seconds() >= 3 * 180


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")
def test_kustomize_puts_everything_into_one_namespace():
    built = subprocess.run(
        ["kubectl", "kustomize", str(DEPLOY / "kubernetes")],
        capture_output=True,
        text=True,
        check=True,
    )
    found = list(yaml.safe_load_all(built.stdout))
    assert len(found) == len(OBJECTS) + 1
    assert {each["metadata"]["namespace"] for each in found} == {"penstock"}
    assert "image: penstock\n" not in built.stdout


def test_kubernetes_takes_every_object():
    validate = pytest.importorskip("kubernetes_validate")
    release = validate.latest_version().rsplit(".", 1)[0]
    for each in OBJECTS:
        validate.validate(each, release, strict=True)


@pytest.mark.parametrize("values", [{}, {"gpus": 8, "node_selector": {"gpu": "h200"}}], ids=str)
def test_the_worker_makes_a_job_of_a_flow_run_that_kubernetes_takes(values):
    worker = pytest.importorskip("prefect_kubernetes.worker")
    validate = pytest.importorskip("kubernetes_validate")
    making = worker.KubernetesWorkerJobConfiguration.from_template_and_values(
        TEMPLATE, values, client=object()
    )
    manifest = asyncio.run(making).job_manifest
    manifest["metadata"] = {"generateName": "a-run-"}
    manifest["spec"]["template"]["spec"]["containers"][0]["args"] = ["prefect", "version"]
    validate.validate(manifest, validate.latest_version().rsplit(".", 1)[0], strict=True)
    limits = manifest["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits.get("nvidia.com/gpu") == values.get("gpus")


def test_the_pinned_triton_is_the_one_that_the_pinned_pytorch_asks_for():
    """As the table of docs/install.md has it, from the metadata of PyTorch's wheels with CUDA."""
    pins = dict(
        re.findall(r"^(torch|triton)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    )
    rows = re.findall(
        r"^\| (\S+)(?: \(pinned\))? \| \S+ \| (\S+) \|",
        (ROOT / "docs/install.md").read_text(),
        re.M,
    )
    assert dict(rows)[pins["torch"]] == pins["triton"]
