import numpy as np
import pytest

from penstock.core.errors import ArtifactError
from penstock.rows.ref_logprobs import RefLogprobs, drop_damaged, write_scores, write_shared_scores
from penstock.rows.schema import DIGEST_BYTES

SAMPLES = [bytes([number]) * DIGEST_BYTES for number in range(1, 6)]
SCORES = np.arange(10.0).reshape(5, 2) - 20.5


def test_scores_of_several_files_are_found_by_their_samples(tmp_path):
    write_shared_scores(tmp_path, SAMPLES[:2], SCORES[:2])
    write_scores(tmp_path, SAMPLES[2:], SCORES[2:])
    found = RefLogprobs(tmp_path)
    assert np.array_equal(found.get(SAMPLES[::-1]), SCORES[::-1])
    assert found.missing([SAMPLES[0], b"another", b"another"]) == [b"another"]
    assert drop_damaged(tmp_path) == []
    assert RefLogprobs(tmp_path / "absent").missing(SAMPLES) == SAMPLES


def test_every_flipped_bit_of_kept_scores_is_found(tmp_path):
    write_shared_scores(tmp_path, SAMPLES, SCORES)
    [file] = tmp_path.iterdir()
    content = file.read_bytes()
    for at in range(len(content)):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
        with pytest.raises(ArtifactError, match=f"{file.name} is damaged"):
            RefLogprobs(tmp_path)


@pytest.mark.parametrize("damage", [lambda content: content[:-9], lambda _: b""])
def test_damaged_files_of_scores_are_dropped_and_named_and_others_stay(tmp_path, damage):
    write_shared_scores(tmp_path, SAMPLES[:2], SCORES[:2])
    [file] = tmp_path.iterdir()
    write_shared_scores(tmp_path, SAMPLES[2:], SCORES[2:])
    file.write_bytes(damage(file.read_bytes()))
    assert drop_damaged(tmp_path) == [file]
    assert RefLogprobs(tmp_path).missing(SAMPLES) == SAMPLES[:2]
