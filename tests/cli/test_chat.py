"""Chatting with a model: transformers and peft say what it should have answered."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from tokenizers.processors import TemplateProcessing
from transformers.utils.quantization_config import Mxfp4Config

from penstock.cli.chat.resolve_model import load_target, resolve_target
from penstock.cli.chat.session import ChatOptions, ChatSession, Conversation
from penstock.cli.console import Console
from penstock.core.errors import ConfigError
from penstock.core.files import read_json, write_json
from penstock.engine.distributed.ranks import init_process_group
from penstock.engine.generation.sampling import SamplingParams
from penstock.evaluate.chat_model import ChatModel, Reply, StoppedError
from penstock.rows.tokenizer import byte_tokenizer
from tests.engine import runs
from tests.engine.peft.test_mxfp4 import publish
from tests.ranks import on_ranks

NEW = 20
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
]


def model_folder(folder: Path) -> Path:
    """A random model of bytes, with its tokenizer."""
    runs.write_model(folder, seed=1, initializer_range=0.2)
    byte_tokenizer().save_pretrained(folder)
    return folder


def adapter_folder(folder: Path, base: Path, **config: Any) -> Path:
    """A random adapter of which neither factor is zero."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(3)
    wrapped = peft.get_peft_model(
        model,
        peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"], **config),
    )
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    wrapped.save_pretrained(str(folder))
    return folder


def replies_of(typed: str, adapter: str | None, scratch: str) -> tuple[str, str, int]:
    """On one rank: the text as it was streamed, the reply's, and its tokens."""
    torch.set_num_threads(1)
    ranks = init_process_group(60)
    target = resolve_target(typed, (), adapter, Path(scratch), lambda _: None)
    model = load_target(target, ranks, Path(scratch), lambda _: None)
    pieces: list[str] = []
    how = SamplingParams(max_tokens=NEW, temperature=0, stop_tokens=model.ends)
    reply = model.reply(TALK, how, pieces.append, lambda: None)
    return "".join(pieces), reply.text, reply.tokens


def generated(model: Any) -> tuple[str, int]:
    """What transformers answers, greedily."""
    tokenizer = byte_tokenizer()
    text = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer.encode(str(text), add_special_tokens=False)])
    out = model.eval().generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
    )
    new = out[0, ids.shape[1] :].tolist()
    return str(tokenizer.decode(new, skip_special_tokens=True)), len(new)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("form", ["model", "adapter", "folder of an adapter", "several ranks"])
def test_a_model_answers_what_transformers_generates(form: str, tmp_path: Path) -> None:
    base = model_folder(tmp_path / "base")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    typed, adapter = str(base), None
    if form != "model":
        # Ranks that differ are not computed beside the base, and are merged for it.
        more = {"rank_pattern": {"q_proj": 2}} if form == "several ranks" else {}
        laid = adapter_folder(tmp_path / "adapter", base, **more)
        theirs = peft.PeftModel.from_pretrained(theirs, str(laid))
        typed, adapter = (str(base), str(laid)) if form == "adapter" else (str(laid), None)
    (tmp_path / "scratch").mkdir()
    [(streamed, text, tokens)] = on_ranks(1, replies_of, typed, adapter, str(tmp_path / "scratch"))
    assert (text, tokens) == generated(theirs)
    assert streamed == text


@pytest.mark.slow
@pytest.mark.dist
def test_published_codes_are_dequantized_to_answer(tmp_path: Path) -> None:
    base = tmp_path / "base"
    publish(base)
    config = read_json(base / "config.json")
    write_json(base / "config.json", {**config, "dtype": "float32"})
    byte_tokenizer().save_pretrained(base)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        base,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=Mxfp4Config(dequantize=True),
    )
    [(_, text, tokens)] = on_ranks(1, replies_of, str(base), None, str(tmp_path))
    assert (text, tokens) == generated(theirs)


class Echo:
    """In a model's place: says how many messages it was given."""

    ends = (0,)
    has_template = True

    def __init__(self, stop: bool = False) -> None:
        self.stop = stop
        self.asked: list[list[dict[str, str]]] = []

    def reply(self, messages: Any, how: SamplingParams, on_text: Any, check_stop: Any) -> Reply:
        self.asked.append(list(messages))
        text = f"{len(messages)} at {how.temperature:g}, {how.seed}"
        on_text(text)
        if self.stop:
            import signal

            signal.raise_signal(signal.SIGINT)
            with pytest.raises(StoppedError):
                check_stop()
            return Reply(text, 1, "interrupted")
        return Reply(text, 1, "stop")


def talking(*models: Echo, system: str | None = None, as_json: bool = False) -> ChatSession:
    options = ChatOptions("run.yaml", temperature=0, seed=5)
    conversations = [
        Conversation(label, "a model", model)  # pyright: ignore[reportArgumentType]
        for label, model in zip(("model", "base"), models, strict=False)
    ]
    talk = ChatSession(options, Console(as_json), conversations, system)
    talk.reset()
    return talk


def test_a_conversation_is_remembered_until_it_is_reset(capsys: Any) -> None:
    model, base = Echo(), Echo()
    talk = talking(model, base, system="Be brief.")
    talk.ask("one")
    talk.ask("two")
    assert [m["role"] for m in model.asked[-1]] == ["system", "user", "assistant", "user"]
    assert "model: 4 at 0, 6\nbase: 4 at 0, 6\n" in capsys.readouterr().out
    assert talk.command("/system")
    talk.ask("three")
    assert [m["content"] for m in model.asked[-1]] == ["three"]
    assert not talk.command("/quit")


def test_a_saved_conversation_is_a_sample_that_prepare_reads(tmp_path: Path) -> None:
    talk = talking(Echo(), system="Be brief.")
    file = tmp_path / "chats.jsonl"
    with pytest.raises(ConfigError, match="no answer to save"):
        talk.command(f"/save {file}")
    for text in ("größer?", "two"):
        talk.ask(text)
        talk.command(f"/save {file}")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [len(row["messages"]) for row in rows] == [3, 5]
    assert rows[0]["messages"][1] == {"role": "user", "content": "größer?"}


def test_ctrl_c_stops_the_answer_and_not_the_chat(capsys: Any) -> None:
    talk = talking(Echo(stop=True))
    [reply] = talk.ask("go on forever")
    assert reply.ended == "interrupted"
    assert "[interrupted]" in capsys.readouterr().err
    talk.conversations[0].model.stop = False  # pyright: ignore[reportAttributeAccessIssue]
    assert talk.ask("and now?")[0].ended == "stop"


def test_lines_of_stdin_are_turns_of_one_conversation(monkeypatch: Any) -> None:
    from penstock.cli.chat.session import _run_session  # pyright: ignore[reportPrivateUsage]

    model = Echo()
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\n"))
    found = _run_session(talking(model, as_json=True))
    assert [answer["prompt"] for answer in found["answers"]] == ["one", "two"]
    assert found["answers"][1]["model"]["text"] == "3 at 0, 6"


def test_a_rendered_prompt_has_no_special_tokens_but_those_of_its_template() -> None:
    tokenizer: Any = byte_tokenizer()
    first = tokenizer.convert_ids_to_tokens(7)
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, 7)]
    )
    assert tokenizer.encode("x")[0] == 7
    model = ChatModel(None, tokenizer, ())  # pyright: ignore[reportArgumentType]
    rendered = tokenizer.apply_chat_template(TALK, add_generation_prompt=True, return_dict=False)
    assert model.encode(TALK) == rendered


def test_without_a_template_the_last_message_is_completed() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    model = ChatModel(None, tokenizer, ())  # pyright: ignore[reportArgumentType]
    assert not model.has_template
    assert tokenizer.decode(model.encode(TALK)) == "What is 2 + 2?"


def test_a_folder_without_a_model_is_refused_with_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither a run nor a model.*\n  Name a config"):
        resolve_target(str(tmp_path), (), None, tmp_path, lambda _: None)
