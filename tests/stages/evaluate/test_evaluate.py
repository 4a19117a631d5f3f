"""Exact match, judged by greedy decoding written out: one prompt, one token at a time."""

import re
from functools import partial

import pyarrow as pa
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3Config

from penstock.core.cache.stage import Artifact
from penstock.core.errors import CapabilityError, StageError
from penstock.core.files import read_json, write_json
from penstock.evaluate.exact_match import exact_match, last_match
from penstock.rows.schema import IGNORED, PREPARED
from penstock.rows.tokenizer import byte_tokenizer

# peft asks transformers for a name that transformers has since changed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

LENGTH = 6
PROMPTS = [b"12+30=", b"a longer question, then: ", b"?", b"7-5="]


def random_model():
    config = Qwen3Config(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.4,
    )
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
def greedy(model, prompt: bytes) -> list[int]:
    ids = list(prompt)
    for _ in range(LENGTH):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def prepared(path, rows: list[tuple[list[int], list[int]]]) -> Artifact:
    """Rows of token ids and labels, half of them in each of two slices."""
    folder = path / "data/validation"
    folder.mkdir(parents=True)
    for number, part in enumerate((rows[: len(rows) // 2], rows[len(rows) // 2 :])):
        columns = {
            "input_ids": [ids for ids, _ in part],
            "labels": [labels for _, labels in part],
            "source": pa.array(["s"] * len(part)).dictionary_encode(),
            "row": list(range(len(part))),
        }
        table = pa.table(columns, schema=PREPARED)
        with pa.ipc.new_file(str(folder / f"slice-{number:016x}.arrow"), PREPARED) as writer:
            writer.write_table(table)
    return Artifact("prepare", "0" * 64, path)


def row(prompt: bytes, answer: list[int], *after: list[int]) -> tuple[list[int], list[int]]:
    """A prompt, a trained answer, then untrained and trained spans in turn."""
    ids, labels = [*prompt, *answer], [IGNORED] * len(prompt) + answer
    for number, span in enumerate(after):
        ids += span
        labels += span if number % 2 else [IGNORED] * len(span)
    return ids, labels


@pytest.fixture
def exported(tmp_path):
    """A folder as an export leaves it, and its model; generation ends at a token it does say."""
    model = random_model()
    end = greedy(model, PROMPTS[0])[2]
    model.generation_config.eos_token_id = end
    model.generation_config.temperature = 0.5  # sampling advice, which greedy decoding ignores
    model.generation_config.do_sample = True
    model.generation_config.repetition_penalty = 3.0
    model.generation_config.num_beams = 2
    model.save_pretrained(tmp_path / "hf")
    byte_tokenizer().save_pretrained(tmp_path / "hf")
    return tmp_path / "hf", model, end


@pytest.mark.parametrize("batch_size", [1, 3])
def test_counts_exactly_the_answers_that_greedy_decoding_gives(exported, tmp_path, batch_size):
    folder, model, end = exported
    right = [greedy(model, prompt) for prompt in PROMPTS]
    newline = ord("\n")
    rows = [
        # The model ends here: what the template puts after the end token is not asked for.
        row(PROMPTS[0], [*right[0][: right[0].index(end) + 1], newline]),
        row(PROMPTS[1], [*right[1][:-1], (right[1][-1] + 1) % 256]),
        # Two turns, of which the first is asked.
        row(PROMPTS[2], right[2][:2], [newline], [1, 2, 3]),
        # The answer should have ended, and the model goes on.
        row(PROMPTS[3], [*right[3][:1], end]),
        ([5, 6, 7], [5, 6, 7]),
        ([5, 6, 7], [IGNORED] * 3),
    ]
    assert right[3][1] != end
    assert end not in right[1]
    assert end not in right[2][:2]
    report = exact_match(
        folder, prepared(tmp_path / "data", rows), limit=100, seed=0, batch_size=batch_size
    )
    assert [sample.right for sample in report.samples] == [True, False, True, False]
    assert (report.num_asked, report.num_right, report.num_skipped) == (4, 2, 2)
    assert report.accuracy == 0.5
    assert [sample.prompt for sample in report.samples] == [p.decode() for p in PROMPTS]


def test_only_what_a_pattern_finds_last_is_compared(exported, tmp_path):
    folder, model, end = exported
    signs = range(ord("!"), ord("~"))
    # An answer may have twice the two tokens of the expected one.
    said = {bytes([65 + n]): greedy(model, bytes([65 + n]))[:4] for n in range(26)}
    said = {
        prompt: [token for token in tokens if token in signs]
        for prompt, tokens in said.items()
        if end not in tokens
    }
    (one, first), (other, second) = [pair for pair in said.items() if len(set(pair[1])) > 1][:2]
    nothing = 0xFF
    rows = [
        row(one, [nothing, first[-1]]),
        row(other, [nothing, next(sign for sign in second if sign != second[-1])]),
        row(b"?", [nothing, nothing]),
    ]
    data = prepared(tmp_path / "data", rows)
    asked = {"limit": 9, "seed": 0, "batch_size": 1}
    report = exact_match(folder, data, answer=re.compile("([!-}])"), **asked)
    assert [sample.right for sample in report.samples] == [True, False]
    assert report.num_skipped == 1
    assert last_match(re.compile(r"#### (\d+)"), "#### 3, no: #### 42 ") == "42"
    assert last_match(re.compile(r"\d+"), "none") is None
    with pytest.raises(StageError, match="none of the expected answers has what #### matches"):
        exact_match(folder, data, answer=re.compile("####"), **asked)


def rewrite(artifact: Artifact, change) -> Artifact:
    """Replace the columns of every slice."""
    for file in sorted((artifact.path / "data/validation").iterdir()):
        table = change(pa.ipc.open_file(str(file)).read_all())
        with pa.ipc.new_file(str(file), table.schema) as writer:
            writer.write_table(table)
    return artifact


def test_of_preferences_the_chosen_and_the_desirable_answers_are_expected(exported, tmp_path):
    folder, _, _ = exported
    rows = [row(bytes([65 + number]), [1 + number]) for number in range(6)]
    ask = partial(exact_match, folder, limit=6, seed=0, batch_size=6)
    plain = ask(prepared(tmp_path / "plain", rows))

    def as_pairs(table):
        names = [f"chosen_{n}" if n in ("input_ids", "labels") else n for n in table.column_names]
        other = table["input_ids"]
        table = table.rename_columns(names)
        return table.append_column("rejected_input_ids", other).append_column(
            "rejected_labels", other
        )

    pairs = rewrite(prepared(tmp_path / "pairs", rows), as_pairs)
    assert ask(pairs) == plain
    rated = rewrite(
        prepared(tmp_path / "rated", rows),
        lambda t: t.append_column("desirable", pa.array([n == 0 for n in range(len(t))])),
    )
    report = ask(rated)
    assert report.samples == (plain.samples[0], plain.samples[3])


def test_held_out_samples_with_images_are_refused(exported, tmp_path):
    data = rewrite(
        prepared(tmp_path / "data", [row(b"a", [1]), row(b"b", [1])]),
        lambda t: t.append_column("images", pa.array([[bytes(32)]] * len(t))),
    )
    with pytest.raises(CapabilityError, match="images"):
        exact_match(exported[0], data, limit=2, seed=0, batch_size=2)
    # Slices without images do not have the column.
    first = min((data.path / "data/validation").iterdir())
    table = pa.ipc.open_file(str(first)).read_all().drop_columns(["images"])
    with pa.ipc.new_file(str(first), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(CapabilityError, match="images"):
        exact_match(exported[0], data, limit=2, seed=0, batch_size=2)


def test_the_limit_takes_a_seeded_part_of_the_rows(exported, tmp_path):
    folder, _, _ = exported
    rows = [row(bytes([65 + number]), [1]) for number in range(20)]
    data = prepared(tmp_path / "data", rows)

    def asked(seed):
        report = exact_match(folder, data, limit=5, seed=seed, batch_size=5)
        return [sample.prompt for sample in report.samples]

    assert len(set(asked(1))) == 5
    assert asked(1) == asked(1) == sorted(asked(1))
    assert asked(1) != asked(2)


def test_an_adapter_alone_is_asked_through_peft(exported, tmp_path):
    folder, model, _ = exported
    targets = ["q_proj", "down_proj"]
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter))
    adapted.eval()
    adapter = tmp_path / "adapter"
    adapted.peft_config["default"].base_model_name_or_path = f"../{folder.name}"
    adapted.save_pretrained(adapter, save_embedding_layers=False)
    byte_tokenizer().save_pretrained(adapter)
    answers = [greedy(adapted, prompt)[:2] for prompt in PROMPTS]
    assert answers != [greedy(random_model(), prompt)[:2] for prompt in PROMPTS]
    rows = [row(prompt, answer) for prompt, answer in zip(PROMPTS, answers, strict=True)]
    data = prepared(tmp_path / "data", rows)
    assert exact_match(adapter, data, limit=9, seed=0, batch_size=4).accuracy == 1.0


def test_data_without_a_question_is_a_failed_stage_that_says_what_to_set(exported, tmp_path):
    folder, _, _ = exported
    with pytest.raises(StageError, match=r"none of 1 validation rows has a prompt .*\s.*--harness"):
        exact_match(
            folder, prepared(tmp_path / "d", [([1, 2], [1, 2])]), limit=1, seed=0, batch_size=1
        )
    absent = Artifact("prepare", "0" * 64, tmp_path / "absent")
    with pytest.raises(StageError, match=r"data\.val_set_size"):
        exact_match(folder, absent, limit=1, seed=0, batch_size=1)


def test_a_quantized_model_without_what_decodes_it_is_refused(exported, tmp_path, monkeypatch):
    folder, _, _ = exported
    config = read_json(folder / "config.json")
    write_json(
        folder / "config.json",
        {**config, "quantization_config": {"quant_method": "compressed-tensors"}},
    )
    monkeypatch.setattr("penstock.evaluate.folder.find_spec", lambda _: None)
    data = prepared(tmp_path / "d", [row(PROMPTS[0], [65])])
    with pytest.raises(CapabilityError, match="pip install compressed-tensors"):
        exact_match(folder, data, limit=1, seed=0, batch_size=1)
