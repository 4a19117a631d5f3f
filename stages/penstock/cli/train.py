"""One rank of training: `torchrun ... -m penstock.cli.train CONFIG [--train.lr 2e-5]`, or
`srun --ntasks-per-node N python -m penstock.cli.train CONFIG`.

Every rank runs this. First the inputs of training are built: all ranks request them, one holds the
lock and builds, the others then find the result. During training rank 0 holds the lock of the
output folder and writes the manifest, as the stage does when it starts torchrun itself.
"""

import sys
from pathlib import Path

from penstock.cli.console import Console, outcome_table, run
from penstock.config.loading.cli_overrides import split_overrides
from penstock.config.loading.load import load
from penstock.core import env
from penstock.core.cache.store import find_cached
from penstock.core.errors import ConfigError
from penstock.pipeline.plan import RebuildOptions, execute_stage, plan, with_chosen_settings
from penstock.train.launch.multi_node import DistributedStage
from penstock.train.launch.torchrun import config_environment


def main(argv: list[str]) -> int:
    """Train on this rank and return its exit status."""
    env.be_rank_of_slurm()
    started = env.rank_variables()
    rank = started[0] if started else 0
    console = Console()

    def command() -> None:
        arguments, overrides = split_overrides(argv)
        flags = [argument for argument in arguments if argument.startswith("--")]
        files = [argument for argument in arguments if not argument.startswith("--")]
        if len(files) != 1 or set(flags) - {"--fresh"}:
            raise ConfigError(
                "usage: torchrun ... -m penstock.cli.train CONFIG [--section.field value] [--fresh]"
            )
        notify = console.say if rank == 0 else lambda _: None
        config = load(Path(files[0]), overrides, notify)
        # Before torch is imported and reads them; variables that are already set stay.
        env.default(config_environment(config))
        planned = plan(config, ("train",), ranks="this_process")
        rebuild = RebuildOptions(fresh="--fresh" in flags)
        for step in planned.steps:
            stage = step.stage
            if rank == 0 or not isinstance(stage, DistributedStage):
                console.outcomes.append(execute_stage(step, planned.run, rebuild, notify))
            elif find_cached(step) is None:
                # As rank 0 does, which says what was chosen.
                stage = with_chosen_settings(step, notify).stage
                assert isinstance(stage, DistributedStage)
                stage.follow(step.path)
        if rank == 0:
            console.result(outcome_table(console.outcomes))
        # A rank that found all results cached has not imported torch, which takes seconds.
        if "torch" in sys.modules:
            from penstock.engine.distributed.ranks import destroy_process_group

            destroy_process_group()

    return run(console, command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
