"""Training server launcher with xorl's command line options.

`python -m penstock.server --mode auto --config c.yaml [--api-port 8000] [--server.key value ...]`
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.config.loading.cli_overrides import Override, split_overrides
from penstock.config.server.load import load_server
from penstock.core import env
from penstock.core.errors import PenstockError
from penstock.server.launch.prepare import prepare, require_packages
from penstock.server.launch.supervisor import serve

FIELDS = {
    "api_host": "where the API listens",
    "api_port": "its port; 0 takes a free one",
    "operation_timeout": "seconds that one operation may take",
    "max_pending_requests": "requests of one owner at a time",
    "log_level": "DEBUG, INFO, WARNING or ERROR",
    "nnodes": "machines that train together",
    "node_rank": "number of this one among them",
    "master_addr": "name or address of the first one",
    "master_port": "a free port of it",
}
"""Settings with their own option."""


def main(argv: Sequence[str]) -> int:
    """Serve until asked to stop; return the exit status."""
    env.default({"TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_TELEMETRY": "1"})
    try:
        arguments, overrides = split_overrides(argv)
        args = _parser().parse_args(arguments)
        options = [
            Override(f"server.{name}", value)
            for name in FIELDS
            if (value := getattr(args, name)) is not None
        ]
        require_packages()
        config = load_server(args.config, [*options, *overrides], _say)
        serve(prepare(config, args.mode, args.worker_address), _say)
    except PenstockError as error:
        _say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m penstock.server",
        epilog="Any setting can be written as --server.name value.",
        # argparse would take any unambiguous beginning of an option for it.
        allow_abbrev=False,
    )
    parser.add_argument(
        "--mode",
        choices=("auto", "connect", "workers"),
        default="auto",
        help="start all processes; all but the workers; or the workers alone",
    )
    parser.add_argument("--config", type=Path, required=True, help="the server's YAML file")
    parser.add_argument("--worker-address", help="connect: where rank 0 listens, tcp://host:port")
    for name, about in FIELDS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, help=about)
    return parser


def _say(line: str) -> None:
    sys.stderr.write(f"server: {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
