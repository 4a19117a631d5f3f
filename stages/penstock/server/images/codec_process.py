"""Codec process of a server whose model takes images: `api.wire.codec_process` with an image
processor.

`python -m penstock.server.images.codec_process PARENT MEMORY FOLDER` is started by `codec_pool`.
"""

import sys
from contextlib import redirect_stdout

from penstock.server.api.wire.codec_process import main
from penstock.server.images.expand import load_expander

if __name__ == "__main__":
    # Results alone are written to standard output.
    with redirect_stdout(sys.stderr):
        expander = load_expander(sys.argv[3])
    main(int(sys.argv[1]), int(sys.argv[2]), expander)
