"""Preference data with images: the prompt's, in whichever form a record has them."""

from base64 import b64encode

import numpy as np
import pytest

from penstock.core.errors import StageError
from penstock.media.reference import image_digest
from penstock.pack.settings import PackSettings
from penstock.pack.stage import Pack
from penstock.rows.filter_rows import select_samples
from penstock.rows.prepared import PreparedSamples
from penstock.rows.reader import PackedRows
from tests.media.pictures import picture
from tests.media.tiny_processors import load_processor, write_processor
from tests.stages.prepared import prepare, run, write_lines

PICTURES = [picture(n, 30 + 17 * n, 70 - 11 * n) for n in range(3)]
PART, TEXT = {"type": "image", "path": "0.png"}, {"type": "text", "text": "What is it?"}
UNNAMED = {"type": "image", "text": None}
PROMPT = [{"role": "user", "content": [PART, TEXT]}]
ANSWERS = {"chosen": "A cat.", "rejected": "A dog."}
ASKED = {"from": "human", "value": "<image>What is it?"}
SAID = {name: [{"role": "assistant", "content": text}] for name, text in ANSWERS.items()}

PAIRS = {
    "a part of the prompt": {"prompt": PROMPT, **ANSWERS},
    "a part of whole conversations": {name: [*PROMPT, *said] for name, said in SAID.items()},
    "a column and a placeholder": {
        **{"prompt": "<image>What is it?", "images": ["0.png"]},
        **ANSWERS,
    },
    "LLaMA-Factory's": {
        "conversations": [ASKED],
        **{name: {"from": "gpt", "value": text} for name, text in ANSWERS.items()},
        "images": ["0.png"],
    },
    "TRL's": {
        "images": [{"bytes": None, "path": "0.png"}],
        "prompt": [{"role": "user", "content": [UNNAMED, TEXT]}],
        **{
            name: [{"role": "assistant", "content": [{"type": "text", "text": text}]}]
            for name, text in ANSWERS.items()
        },
    },
    "bytes": {
        "prompt": [
            {
                "role": "user",
                "content": [{"type": "image", "base64": b64encode(PICTURES[0]).decode()}, TEXT],
            }
        ],
        **ANSWERS,
    },
}
MESSAGES = {
    "a column without a placeholder": (
        {"prompt": "What is it?", **ANSWERS, "images": ["0.png"]},
        "it has 1 images and no <image> in its text",
    ),
    "an image between answers": (
        {
            name: [*PROMPT, *said, *PROMPT, {"role": "assistant", "content": name}]
            for name, said in SAID.items()
        },
        "it has an image behind the prompt, in what is compared",
    ),
    "a file that is missing": ({"prompt": "<image>?", **ANSWERS, "images": ["9.png"]}, "9.png"),
}


def written(folder, records, family="qwen2_5_vl", kind="preference", **settings):
    """(samples, prepared artifact) of records beside which the pictures are."""
    model = folder / "model"
    if not model.exists():
        write_processor(family, model)
    for number, content in enumerate(PICTURES):
        (folder / f"{number}.png").write_bytes(content)
    data = write_lines(folder / "pairs.jsonl", records)
    its = {"type": kind, **settings}
    stage = prepare((data, its), tokenizer=str(model), shuffle_merged_datasets=False)
    artifact, _ = run(stage, folder / "prepared")
    return PreparedSamples(artifact.path, "train"), artifact


def test_every_form_of_a_pair_is_the_same_sample(tmp_path):
    samples, _ = written(tmp_path, list(PAIRS.values()))
    processor = load_processor(tmp_path / "model")
    assert len(samples) == len(PAIRS)
    first = samples.sample(0)
    [(digest, count)] = first.images
    assert digest == image_digest(PICTURES[0])
    for place in range(len(samples)):
        sample = samples.sample(place)
        assert sample.images == first.images
        for name, (ids, labels) in sample.sides.items():
            assert np.array_equal(ids, first.sides[name][0])
            assert int((ids == processor.token_id).sum()) == count
            assert processor.token_id not in labels


@pytest.mark.parametrize("name", MESSAGES)
def test_pairs_whose_images_cannot_be_used_are_dropped_with_the_reason(tmp_path, name):
    record, why = MESSAGES[name]
    good = [PAIRS["a part of the prompt"]]
    with pytest.raises(StageError, match=why):
        written(tmp_path, [record, *good])


def test_a_prompt_that_ends_with_an_image_is_refused(tmp_path):
    template = (
        "{%- for m in messages -%}{%- if m.content is string -%}{{ m.content }}<|im_end|>"
        "{%- else -%}{%- for c in m.content -%}{%- if c.type == 'text' -%}{{ c.text }}"
        "{%- else -%}<|image_pad|>{%- endif -%}{%- endfor -%}{%- endif -%}{%- endfor -%}"
    )
    write_processor("qwen2_5_vl", tmp_path / "model", template)
    record = {"prompt": [{"role": "user", "content": [TEXT, PART]}], **ANSWERS}
    with pytest.raises(StageError, match="its prompt ends with an image"):
        written(tmp_path, [record])


def asked(*numbers, chosen="A cat.", rejected="A dog."):
    images = [{"type": "image", "path": f"{number}.png"} for number in numbers]
    prompt = [{"role": "user", "content": [*images, TEXT]}]
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def packed(artifact, out, **settings):
    facts = Pack(PackSettings(sample_packing_sequence_len=512, **settings), artifact).run(out)
    return PackedRows(out / "data" / "train"), facts


@pytest.mark.parametrize("shares", [True, False])
def test_packed_pairs_have_the_images_of_each_document(tmp_path, shares):
    records = [asked(0, 1), asked(chosen="No."), asked(2), asked(1, chosen="Well.")]
    _, artifact = written(tmp_path, records)
    rows, facts = packed(artifact, tmp_path / "packed", share_prompts=shares)
    assert facts["images"]["train"] == 4
    [row] = [rows.row(at) for at in range(len(rows))]
    assert row.branching is not None
    copies = 1 if shares else 2
    counts = [n for n in (2, 0, 1, 1) for _ in range(copies)]
    assert row.branching.image_counts == tuple(counts)
    found = [image.digest for image in row.images]
    wanted = [[0, 1], [], [2], [1]]
    digests = [image_digest(PICTURES[n]) for some in wanted for _ in range(copies) for n in some]
    assert found == digests
    token = load_processor(tmp_path / "model").token_id
    assert int((row.input_ids == token).sum()) == sum(each.num_tokens for each in row.images)
    assert token not in row.labels
    some = select_samples(row, set(row.branching.samples[2:]))
    assert some is not None
    assert [each.digest for each in some.images] == digests[2 * copies :]
    assert int((some.input_ids == token).sum()) == sum(each.num_tokens for each in some.images)


def test_samples_that_differ_in_images_alone_have_other_reference_log_probs(tmp_path):
    other = [{"role": "user", "content": [{**PART, "path": "same size.png"}, TEXT]}]
    records = [asked(0), {"prompt": other, **ANSWERS}]
    (tmp_path / "same size.png").write_bytes(picture(7, 30, 70))
    samples, artifact = written(tmp_path, records)
    first, second = (samples.tokens("chosen", place)[0] for place in (0, 1))
    assert np.array_equal(first, second)
    rows, _ = packed(artifact, tmp_path / "packed")
    assert len(set(rows.samples())) == 2


def test_an_answer_of_kto_has_the_images_of_its_prompt(tmp_path):
    records = [
        {"prompt": asked(n)["prompt"], "completion": f"A cat {n}.", "label": n < 2}
        for n in range(3)
    ]
    samples, artifact = written(tmp_path, records, kind="kto")
    assert [len(samples.images(place)[0]) for place in range(3)] == [1, 1, 1]
    rows, _ = packed(artifact, tmp_path / "packed")
    [row] = [rows.row(at) for at in range(len(rows))]
    token = load_processor(tmp_path / "model").token_id
    assert int((row.input_ids == token).sum()) == sum(each.num_tokens for each in row.images)
