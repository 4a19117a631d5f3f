"""What Prefect costs a pipeline: `python -m tests.bench.bench_flow`.

The flow and the bare stages of a finished run, and an empty flow of as many tasks, in turns in one
process against a server of their own on loopback: medians of five after one of each to warm up.
What the flow takes beyond the bare stages is to be no more than 1.3 of the empty flow, and all of
it, every stage cached, no more than 3 seconds. Figures go to docs/benchmarks/cpu.md.
"""

import logging
import os
import sys
import tempfile
from pathlib import Path

from penstock.config.loading.load import load
from penstock.pipeline.plan import RebuildOptions, execute_stage, plan
from tests.bench.pages import write_section
from tests.bench.timing import medians
from tests.flows.server import Prefect
from tests.pipeline.runs import penstock, write_run

FLOWS = Path(__file__).resolve().parents[2] / "flows"
GOAL, CACHED_GOAL = 1.3, 3.0


def measured(config: Path) -> dict[str, float]:
    """Seconds of each, with Prefect's server in the environment."""
    sys.path.insert(0, str(FLOWS))
    # Prefect reads the environment when it is first imported, and flows/ is no package.
    from prefect import flow, task
    from prefect.cache_policies import NO_CACHE

    import finetune  # pyright: ignore[reportMissingImports]

    logging.getLogger("prefect").setLevel(logging.ERROR)
    num_tasks = len(plan(load(config)).steps)

    @task(cache_policy=NO_CACHE, persist_result=False)
    def nothing() -> None: ...

    @flow(persist_result=False)
    def empty() -> None:
        for _ in range(num_tasks):
            nothing()

    def bare() -> None:
        planned = plan(load(config))
        for step in planned.steps:
            assert execute_stage(step, planned.run, RebuildOptions(), print).status == "cached"

    return medians(
        {"the flow": lambda: finetune.finetune(config), "an empty flow": empty, "bare": bare}
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = write_run(Path(folder))
        penstock("run", config)
        server = Prefect(Path(folder) / "prefect")
        try:
            server.start()
            os.environ.update(server.environment)
            seconds = measured(config)
        finally:
            server.stop()
    whole, empty, bare = (seconds[name] for name in ("the flow", "an empty flow", "bare"))
    ratio = (whole - bare) / empty
    lines = [
        "A finished pipeline of four stages (`tests/bench/bench_flow.py`), against a server on "
        "loopback; medians of five, in turns.",
        "",
        "| | seconds |",
        "|---|---|",
        f"| the flow, every stage cached | {whole:.2f} (goal {CACHED_GOAL}) |",
        f"| the bare stages | {bare:.3f} |",
        f"| an empty flow of four tasks | {empty:.2f} |",
        "",
        f"What the flow takes beyond the bare stages is {ratio:.2f} of the empty flow "
        f"(goal {GOAL}).",
    ]
    print("\n".join(lines))
    write_section("cpu", "Prefect overhead", lines)


if __name__ == "__main__":
    main()
