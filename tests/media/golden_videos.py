"""Write `tests/golden/videos.json`: what transformers' processors give for the cases in `videos`.

They need torchvision, whose builds fail to import beside PyTorch for the CPU because operators are
missing that no processor calls; so their registration is left out here.

    PYTHONPATH=.:stages:kernels:FOLDER_OF_TORCHVISION python tests/media/golden_videos.py
"""

import json
import sys
from hashlib import sha256
from importlib import import_module
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

GOLDEN = Path(__file__).parents[1] / "golden" / "videos.json"


def main() -> None:
    """Write the file."""
    for name in ("_meta_registrations", "_autograd_registrations"):
        sys.modules[f"torchvision.{name}"] = ModuleType(name)
    import torch
    import transformers
    from PIL import Image

    from tests.media.pictures import picture

    torchvision: Any = import_module("torchvision")
    from tests.media.videos import CASES, SAMPLE, VIDEO, Case, sample, write_video_processor

    def outputs(case: Case, text: str = f"A {VIDEO} B", image: Any = None) -> dict[str, Any]:
        with TemporaryDirectory() as folder:
            write_video_processor(Path(folder), case.family, **case.settings)
            processor: Any = transformers.AutoProcessor.from_pretrained(folder)
            if image is not None:
                text = processor.apply_chat_template(sample("a video", image))
            metadata = {
                "total_num_frames": case.frames,
                "fps": case.fps,
                "frames_indices": [*range(case.frames)],
            }
            found = processor(
                text=[text],
                images=image,
                videos=[torch.from_numpy(case.pixels)],
                video_metadata=[metadata],
                return_tensors="pt",
                return_metadata=True,
                **({} if image is None else {"do_sample_frames": False}),
            )
        seconds = found.get("second_per_grid_ts")
        [metadata] = found.get("video_metadata") or [None]
        return {
            "pixels": sha256(found["pixel_values_videos"].numpy().tobytes()).hexdigest(),
            "first": found["pixel_values_videos"][0, :4].tolist(),
            "grid": found["video_grid_thw"].tolist(),
            "frames": metadata and [int(at) for at in metadata.frames_indices],
            "seconds": None if seconds is None else float(seconds[0]),
            "ids": found["input_ids"][0].tolist(),
        }

    versions = {one.__name__: one.__version__ for one in (transformers, torchvision)}
    made = {
        "made with": versions,
        "cases": {name: outputs(case) for name, case in CASES.items()},
        "samples": {
            name: outputs(case, image=Image.open(BytesIO(picture(0))))
            for name, case in SAMPLE.items()
        },
    }
    GOLDEN.write_text(json.dumps(made) + "\n")


if __name__ == "__main__":
    main()
