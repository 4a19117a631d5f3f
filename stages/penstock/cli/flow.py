"""`penstock flow` and `penstock deploy`: run the Prefect scripts of this package.

Prefect is never imported here: the scripts and the `prefect` command run as processes.
"""

import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

import penstock
from penstock.cli.console import Console
from penstock.cli.options import Config, run_request
from penstock.core.errors import CapabilityError, StageError

PREFECT_FILE = "prefect.yaml"


def flows_folder() -> Path:
    """The folder of the scripts: in the installed package, or beside the source root."""
    package = Path(penstock.__file__).resolve().parent
    inside = package / "flows"
    return inside if inside.is_dir() else package.parents[1] / "flows"


def flow(
    console: Console,
    config: Config,
    recurring: Annotated[
        bool,
        typer.Option("--recurring", help="Run the flow that trains again when the sources grow."),
    ] = False,
) -> dict[str, Any]:
    """Run the whole pipeline as a Prefect flow on this machine."""
    from penstock.config.loading.load import load
    from penstock.core.process.die_with_parent import end_with_parent

    request = run_request(config)
    _require_prefect()
    load(request.file, request.overrides)  # for its errors, before this process is replaced
    script = flows_folder() / ("recurring.py" if recurring else "finetune.py")
    command = [sys.executable, str(script), *request.arguments()]
    if not console.as_json:
        # The flow takes this process's place: signals reach it, and its exit code is ours.
        # `execv` drops what Python still buffers.
        sys.stdout.flush()
        os.execv(sys.executable, command)
    # stdout is for the JSON object, and a flow whose parent was killed would run on.
    done = subprocess.run(
        command, stdout=sys.stderr, preexec_fn=partial(end_with_parent, os.getpid()), check=False
    )
    if done.returncode:
        raise StageError(f"the flow failed with exit status {done.returncode}; see its log above.")
    return {"flow": script.stem}


def deploy(
    console: Console,
    pool: Annotated[
        str, typer.Option(metavar="NAME", help="The work pool; created if it does not exist.")
    ] = "penstock",
    write_only: Annotated[
        bool, typer.Option("--write-only", help="Only write prefect.yaml; contact no server.")
    ] = False,
) -> dict[str, Any]:
    """Write prefect.yaml and register deployments with Prefect."""
    from penstock.core.files import atomic_write
    from penstock.core.remote.prefect_password import WITHOUT_PASSWORD, asks_for_password

    _require_prefect()
    file = Path(PREFECT_FILE)
    # Users edit schedules and parameters in it.
    if file.exists():
        console.say(f"{file} exists already and is used as it is")
    else:
        with atomic_write(file) as part:
            part.write_text(prefect_yaml(Path.cwd(), pool), encoding="utf-8")
        console.say(f"wrote {file}: edit schedules and parameters there")
    if not write_only:
        if asks_for_password(url := prefect_api_url()) is False:
            console.say(f"warning: Prefect's server at {url} {WITHOUT_PASSWORD}")
        if _prefect("work-pool", "inspect", pool, check=False).returncode:
            _prefect("work-pool", "create", pool, "--type", "process")
            console.say(f"created the work pool {pool}")
        _prefect("--no-prompt", "deploy", "--all", "--prefect-file", str(file))
        console.say(
            f"next: prefect worker start --pool {pool}, in a terminal of its own, and\n"
            "  prefect deployment run finetune/finetune -p config=CONFIG"
        )
    console.result(str(file.resolve()))
    return {"file": str(file.resolve()), "pool": pool}


def prefect_yaml(folder: Path, pool: str) -> str:
    """The deployments of this package, for workers that run in `folder`."""
    scripts = flows_folder()
    inside = scripts / PREFECT_FILE
    text = (inside if inside.is_file() else scripts.parent / PREFECT_FILE).read_text("utf-8")
    return (
        text.replace("entrypoint: flows/", f"entrypoint: {scripts}/")
        .replace('"{{ $PENSTOCK_HOME }}"', f'"{folder}"')
        .replace("name: penstock\n      job_variables", f"name: {pool}\n      job_variables")
    )


def prefect_api_url() -> str:
    """`PREFECT_API_URL` of the environment or of Prefect's profile; empty if there is none."""
    done = subprocess.run(
        [
            *(sys.executable, "-c"),
            "from prefect.settings import PREFECT_API_URL as url; print(url.value() or '')",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()


def _require_prefect() -> None:
    if find_spec("prefect") is None:
        raise CapabilityError("Prefect is not installed.\n  Run pip install penstock again.")


def _prefect(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "prefect", *arguments],
        capture_output=True,
        text=True,
        # Its output is captured: nobody would see a question that it waits for.
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if check and done.returncode:
        text = (done.stderr.strip() or done.stdout.strip()).splitlines()[-12:]
        raise StageError(
            f"prefect {' '.join(arguments)} failed:\n  "
            + "\n  ".join(text)
            + "\n  Is PREFECT_API_URL that of a running server (prefect server start)?"
        )
    return done
