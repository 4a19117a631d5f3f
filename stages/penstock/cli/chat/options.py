"""The options of `penstock chat`."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.console import Console
from penstock.cli.options import overrides
from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from penstock.engine.generation.sampling import SamplingParams


@dataclass(frozen=True)
class ChatOptions:
    """The options of the command line."""

    target: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|FOLDER",
            help="A run's YAML file or output folder, a model's or adapter's folder, a hub id.",
        ),
    ]
    adapter: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Load this PEFT adapter on the model.")
    ] = None
    compare: Annotated[
        str | None,
        typer.Option(metavar="BASE", help="Also answer with this model, labelled base."),
    ] = None
    prompt: Annotated[
        list[str],
        typer.Option(help="Answer this and exit. Repeatable: turns of one conversation."),
    ] = field(default_factory=list[str])
    system: Annotated[str | None, typer.Option(help="System message.")] = None
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0: greedy decoding.")
    ] = 0.7
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.")] = 1.0
    top_k: Annotated[int | None, typer.Option(help="Sample from the top k tokens.")] = None
    seed: Annotated[int | None, typer.Option(help="Random seed, for reproducible answers.")] = None
    max_new_tokens: Annotated[int, typer.Option(help="Maximum tokens of an answer.")] = 512

    def sampling(self, ends: tuple[int, ...], turn: int) -> "SamplingParams":
        """Sampling parameters of this turn. Raises ConfigError for invalid values."""
        from penstock.engine.generation.sampling import NO_TOP_K, SamplingParams

        if self.max_new_tokens < 1:
            raise ConfigError(f"--max-new-tokens is {self.max_new_tokens}. Write 1 or more.")
        return SamplingParams(
            max_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_k=NO_TOP_K if self.top_k is None else self.top_k,
            top_p=self.top_p,
            # With one seed for all turns each answer would be drawn with the same numbers.
            seed=None if self.seed is None else self.seed + turn,
            stop_tokens=ends,
        )


def chat_command(console: Console, options: ChatOptions) -> dict[str, Any]:
    """Chat with a trained model, in the terminal or from a script."""
    from penstock.cli.chat.session import chat

    return chat(options, tuple(overrides), console)
