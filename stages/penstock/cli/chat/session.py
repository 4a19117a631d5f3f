"""`penstock chat`: chat with a model in the terminal, or answer prompts from a script."""

import json
import signal
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.chat.options import ChatOptions
from penstock.cli.chat.resolve_model import load_target, resolve_target
from penstock.cli.console import Console
from penstock.config.loading.cli_overrides import Override
from penstock.core.errors import ConfigError, StageError
from penstock.core.os_errors import describe_os_error
from penstock.core.process.scratch_dir import scratch_folder

if TYPE_CHECKING:
    from penstock.evaluate.chat_model import ChatModel, Reply

HELP = """\
/reset         forget the conversation
/system TEXT   set the system message and start over; without TEXT: remove it
/save FILE     append the conversation to a .jsonl file that data of type chat reads
/help          show this
/quit          leave, as Ctrl-D does; Ctrl-C stops an answer"""


@dataclass
class Conversation:
    """A model and its messages so far."""

    label: str
    description: str
    model: "ChatModel"
    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])


@dataclass
class ChatSession:
    """A chat with one model, or with two models that receive the same prompts."""

    options: ChatOptions
    console: Console
    conversations: Sequence[Conversation]
    system: str | None
    turn: int = 0

    def reset(self) -> None:
        """Drop all messages but the system message."""
        self.turn = 0
        start = [{"role": "system", "content": self.system}] if self.system else []
        for conversation in self.conversations:
            conversation.messages = list(start)

    def ask(self, text: str) -> "list[Reply]":
        """Every model's answer, printed while it is generated and added to its messages."""
        replies = [self._answer(conversation, text) for conversation in self.conversations]
        self.turn += 1
        return replies

    def _answer(self, conversation: Conversation, text: str) -> "Reply":
        question = {"role": "user", "content": text}
        sampling = self.options.sampling(conversation.model.ends, self.turn)
        prefix = f"{conversation.label}: " if len(self.conversations) > 1 else ""
        with _catch_interrupt() as check_stop:
            self._write(prefix)
            reply = conversation.model.reply(
                [*conversation.messages, question], sampling, self._write, check_stop
            )
        self._write("\n")
        if reply.ended == "length":
            self.console.say(f"[stopped at --max-new-tokens {self.options.max_new_tokens}]")
        elif reply.ended == "interrupted":
            self.console.say("[interrupted]")
        conversation.messages += [question, {"role": "assistant", "content": reply.text}]
        return reply

    def _write(self, text: str) -> None:
        if not self.console.as_json:
            sys.stdout.write(text)
            sys.stdout.flush()

    def save(self, typed: str) -> None:
        """Append the first model's conversation to a file, as one chat sample."""
        messages = self.conversations[0].messages
        if not typed:
            raise ConfigError("/save needs a file: /save my-chats.jsonl")
        if not any(message["role"] == "assistant" for message in messages):
            raise ConfigError("there is no answer to save yet.")
        path = Path(typed).expanduser()
        try:
            with path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
        except OSError as error:
            raise StageError(f"{path} cannot be written: {describe_os_error(error)}.") from error
        self.console.say(f"saved {len(messages)} messages to {path}")

    def command(self, line: str) -> bool:
        """Execute a line that begins with a slash; false means quit."""
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        if name in ("/quit", "/exit"):
            return False
        if name == "/reset":
            self.reset()
            self.console.say("the conversation is forgotten")
        elif name == "/system":
            self.system = argument or None
            self.reset()
            self.console.say("system message set; the conversation starts over")
            self.warn_without_template()
        elif name == "/save":
            self.save(argument)
        else:
            if name != "/help":
                self.console.say(f"{name} is no command")
            self.console.say(HELP)
        return True

    def warn_without_template(self) -> None:
        """Warn about models without a chat template, which do not see a system message."""
        for conversation in self.conversations:
            if not conversation.model.has_template:
                self.console.say(
                    f"{conversation.label}: the tokenizer has no chat template: each line is "
                    "completed as plain text, without the system message and earlier turns"
                )


def chat(options: ChatOptions, overrides: Sequence[Override], console: Console) -> dict[str, Any]:
    """Chat until the user quits, or answer the prompts of the options; returns fields for --json.

    Raises ConfigError for invalid models or options, StageError if nothing is trained yet.
    """
    from penstock.engine.distributed.ranks import destroy_process_group, init_process_group

    # For its errors, before a model is loaded.
    options.sampling((), 0)
    with scratch_folder("chat") as scratch:
        ranks = init_process_group(600)
        try:
            typed = [("model", options.target, options.adapter)]
            typed += [("base", options.compare, None)] if options.compare else []
            conversations: list[Conversation] = []
            for label, name, adapter in typed:
                folder = scratch / label
                folder.mkdir()
                target = resolve_target(name, overrides, adapter, folder, console.say)
                console.say(f"{label}: {target.description}")
                conversations.append(
                    Conversation(
                        label, target.description, load_target(target, ranks, folder, console.say)
                    )
                )
            session = ChatSession(options, console, conversations, options.system)
            session.reset()
            session.warn_without_template()
            return _run_session(session)
        finally:
            # torch warns at exit of an NCCL group that was not destroyed.
            destroy_process_group()


def _run_session(session: ChatSession) -> dict[str, Any]:
    options = session.options
    if options.prompt or not sys.stdin.isatty() or session.console.as_json:
        prompts = options.prompt or (line.strip() for line in sys.stdin if line.strip())
        answers = [(prompt, session.ask(prompt)) for prompt in prompts]
        return {
            "answers": [_answer_as_json(session, prompt, replies) for prompt, replies in answers]
        }
    with suppress(ImportError):
        import readline  # noqa: F401  # pyright: ignore[reportUnusedImport] - input() then edits
    session.console.say("type a message; /help lists commands")
    while (line := _read_line()) is not None:
        try:
            if line.startswith("/"):
                if not session.command(line):
                    break
            elif line:
                session.ask(line)
        except (ConfigError, StageError) as error:
            session.console.say(f"error: {error}")
    return {}


def _read_line() -> str | None:
    """A line of input; None at end of file. Ctrl-C drops the line."""
    while True:
        try:
            return input("> ").strip()
        except EOFError:
            sys.stdout.write("\n")
            return None
        except KeyboardInterrupt:
            sys.stdout.write("\n")


def _answer_as_json(
    session: ChatSession, prompt: str, replies: "Sequence[Reply]"
) -> dict[str, Any]:
    result: dict[str, Any] = {"prompt": prompt}
    for conversation, reply in zip(session.conversations, replies, strict=True):
        result[conversation.label] = {**vars(reply), "from": conversation.description}
    return result


@contextmanager
def _catch_interrupt() -> Generator[Callable[[], None]]:
    """While the block runs, Ctrl-C ends the answer, not the process: the function that is yielded
    then raises StoppedError."""
    from penstock.evaluate.chat_model import StoppedError

    interrupted = threading.Event()

    def check() -> None:
        if interrupted.is_set():
            raise StoppedError

    # Python's own handler would raise KeyboardInterrupt at any line, also halfway through a token.
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
