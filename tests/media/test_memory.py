"""Memory of the largest image that is read."""

import subprocess
import sys

import pytest
from PIL import Image

from penstock.media.decode import MAX_PIXELS
from tests.media.pictures import exif_of
from tests.media.tiny_processors import write_processor

BOUND = 1.5
"""GB for one image, docs/guide/data.md."""

PROCESS = """
import resource, sys
from pathlib import Path
from penstock.media.decode import decode
from tests.media.tiny_processors import load_processor
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
processor = load_processor(Path(sys.argv[1]))
before, content = peak(), Path(sys.argv[2]).read_bytes()
processor.process(decode(content))
print((peak() - before) / 1e9)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "CMYK"])
def test_an_image_of_the_largest_size_takes_no_more_memory_than_stated(tmp_path, mode):
    side = int(MAX_PIXELS**0.5)
    model = write_processor("qwen3_vl", tmp_path / "model")
    path = tmp_path / ("a.jpg" if mode == "CMYK" else "a.png")
    Image.new(mode, (side, side)).save(path, exif=exif_of(6), compress_level=1)
    command = [sys.executable, "-c", PROCESS, str(model), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) < BOUND
