"""`penstock data show --html`: a page with samples and thumbnails of their images.

It has no scripts and fetches nothing: images are `data:` URIs.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.data.sample_view import (
    ImageView,
    Part,
    SampleView,
    format_counts,
    format_image,
    format_origin,
    printable,
)
from penstock.core.cache.store import PlannedStage
from penstock.core.errors import ConfigError
from penstock.core.files import atomic_write
from penstock.core.os_errors import describe_os_error
from penstock.media.decode import decode
from penstock.media.kinds import VIDEO, BadMedia
from penstock.media.video import open_video
from penstock.prepare.locate_record import build_image_reader

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE = 192
"""Maximum width and height of a thumbnail, in pixels."""

# Should text of a record come through as markup, nothing of it runs or is fetched.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

STYLE = """
:root { color-scheme: light dark }
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif }
pre { white-space: pre-wrap; overflow-wrap: anywhere; opacity: .75 }
b { font-weight: inherit; color: light-dark(#1b7a4b, #62d29b) }
pre i { font-style: inherit; font-weight: bold }
figure { display: inline-block; margin: 0 1rem 1rem 0; vertical-align: top }
figcaption { max-width: 192px; font-size: 12px; overflow-wrap: anywhere }
"""


def write_page(target: Path, shown: Sequence[SampleView], title: str, step: PlannedStage) -> None:
    """Write the samples to `target`. Raises ConfigError if that is no place for a file."""
    read = build_image_reader(step.stage, step.path)
    body = "".join(_sample(sample, read(sample.slice, sample.record)) for sample in shown)
    text = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n<p>{escape(step.where)}</p>\n"
        "<p><b>Green</b> tokens are trained; special tokens are bold.</p>\n"
        f"{body}</body>\n</html>\n"
    )
    try:
        with atomic_write(target) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {target}: {describe_os_error(error)}.") from error


def _sample(shown: SampleView, images: Mapping[bytes, bytes]) -> str:
    figures = "".join(
        _figure(number, image, images.get(bytes.fromhex(image.digest)))
        for number, image in enumerate(shown.images)
    )
    parts = "".join(
        f"<p>{escape(format_counts(shown, part))}</p>\n<pre>{''.join(_spans(part))}</pre>\n"
        for part in shown.parts
    )
    if shown.images and not images:
        figures += "<p>The images are no longer what they were.</p>"
    heading = escape(f"sample {shown.index}: {format_origin(shown)}")
    return f"<section>\n<h2>{heading}</h2>\n{figures}\n{parts}</section>\n"


def _figure(number: int, image: ImageView, content: bytes | None) -> str:
    caption = f"<figcaption>{escape(format_image(number, image))}</figcaption>"
    uri = None if content is None else _thumbnail(content, image.kind)
    picture = f'<img alt="" src="{uri}">' if uri else ""
    return f"<figure>{picture}{caption}</figure>"


def _thumbnail(content: bytes, kind: str) -> str | None:
    """A small JPEG of an encoded image, or of the first frame of a video, as a data URI."""
    try:
        image = _first_frame(content) if kind == VIDEO.name else decode(content)
    except BadMedia:
        return None
    image.thumbnail((SIDE, SIDE))
    stream = BytesIO()
    image.save(stream, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"


def _first_frame(content: bytes) -> "Image":
    from PIL import Image

    return Image.fromarray(next(open_video(content).read([0])))


def _spans(part: Part) -> Iterator[str]:
    for span in part.spans:
        text = escape(printable(span))
        text = f"<i>{text}</i>" if span.special else text
        yield f"<b>{text}</b>" if span.trained else text
