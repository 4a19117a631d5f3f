"""The built-in pictures of shapes."""

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from penstock.core.cache.record import digest_json
from penstock.core.sources.pin import BUILTIN_DATA
from penstock.prepare.builtin import GENERATORS
from penstock.prepare.builtin_pictures import COLORS, SHAPES, SIDE, picture_of_shape
from tests.media.tiny_processors import write_processor
from tests.stages.prepared import prepare, run

GOLDEN = (1, "785bedd55a500412")


def test_changing_the_pictures_raises_their_version():
    records = list(GENERATORS["shapes"]())
    assert len(records) == 1000
    assert (BUILTIN_DATA["builtin:shapes"], digest_json(records)[:16]) == GOLDEN


def test_every_color_and_shape_is_drawn_as_it_is_named():
    names = set()
    for seed in range(len(COLORS) * len(SHAPES)):
        name, content = picture_of_shape(seed)
        _, color, shape = name.split()
        pixels = np.asarray(Image.open(BytesIO(content)))
        assert pixels.shape == (SIDE, SIDE, 3)
        painted = (pixels == COLORS[color]).all(-1)
        # Of the box around it a shape fills a share of its own.
        box = painted[painted.any(1)][:, painted.any(0)]
        share = {"circle": 0.78, "square": 1.0, "triangle": 0.5, "cross": 0.44}[shape]
        assert abs(box.mean() - share) < 0.08, name
        assert painted[SIDE // 2, SIDE // 2]
        names.add(name)
    assert len(names) == len(COLORS) * len(SHAPES)


@pytest.mark.slow
def test_the_pictures_go_through_whole(tmp_path):
    model = write_processor("llava", tmp_path / "model")
    stage = prepare(("builtin:shapes", {"type": "chat"}), tokenizer=str(model))
    _, facts = run(stage, tmp_path / "out")
    assert (facts["rows"]["train"], facts["images"], facts["dropped"]) == (1000, 1000, {})
