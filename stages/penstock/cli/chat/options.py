"""The options of `penstock chat`."""

from typing import Annotated, Any

import typer

from penstock.cli.console import Console
from penstock.cli.options import overrides


def chat_command(
    console: Console,
    target: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|FOLDER",
            help="A run's YAML file or output folder, a model's or adapter's folder, a hub id.",
        ),
    ],
    adapter: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Load this PEFT adapter on the model.")
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(metavar="BASE", help="Also answer with this model, labelled base."),
    ] = None,
    prompt: Annotated[
        list[str],
        typer.Option(help="Answer this and exit. Repeatable: turns of one conversation."),
    ] = [],  # noqa: B006 - typer reads it and never writes it
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0: greedy decoding.")
    ] = 0.7,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Sample from the top k tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed, for reproducible answers.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum tokens of an answer.")] = 512,
) -> dict[str, Any]:
    """Chat with a trained model, in the terminal or from a script."""
    from penstock.cli.chat.session import ChatOptions, chat

    options = ChatOptions(
        target=target,
        adapter=adapter,
        compare=compare,
        system=system,
        prompts=tuple(prompt),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        max_new_tokens=max_new_tokens,
    )
    return chat(options, tuple(overrides), console)
