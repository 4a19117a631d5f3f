"""Codec process: decodes bodies and encodes results.

`python -m penstock.server.api.wire.codec_process PARENT MEMORY` is started by `codec_pool`.

It writes `READY` once it has started. It reads jobs with their bytes from standard input and writes
the results to standard output, each part prefixed by its length. Its environment contains no
secrets.
"""

import gc
import os
import resource
import sys
from typing import BinaryIO

import msgspec
from fastapi.exceptions import RequestValidationError

from penstock.core.process.die_with_parent import end_with_parent
from penstock.server.api.errors import ApiError
from penstock.server.api.wire.chunks import ImageExpander
from penstock.server.api.wire.codec_pool import LENGTH, READY, CodecJob, CodecReply
from penstock.server.api.wire.request_bodies import BodyDecoder, BodyError, BodyJob, to_body_error
from penstock.server.api.wire.response_bodies import ResultJob, write
from penstock.server.protocol.envelopes import Request
from penstock.server.protocol.results import Result


def main(parent: int, memory: int, expander: ImageExpander | None = None) -> None:
    """Run jobs until the input ends. `memory`: limit of this process's data segment in bytes;
    `expander` processes images, where they are taken."""
    end_with_parent(parent)
    os.write(sys.stdout.fileno(), READY)
    # Since Linux 4.7 it counts private mappings too, in which large arrays are.
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    # A core file would hold samples of clients.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    jobs = os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=1 << 20)
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # One job has millions of live objects, over which a garbage collection takes seconds.
    gc.freeze()
    gc.disable()
    while (header := _read_part(jobs)) is not None:
        job = msgspec.msgpack.decode(header, type=CodecJob)
        payload = _read_part(jobs)
        if payload is None:
            return
        reply, output = (
            decode_body(job, payload, expander)
            if isinstance(job, BodyJob)
            else encode_result(job, payload)
        )
        del payload
        for part in (msgspec.msgpack.encode(reply), output):
            replies.write(len(part).to_bytes(LENGTH, "little"))
            replies.write(part)
        replies.flush()
        # `part` is the output too. What these names hold would add to the memory of the next job.
        del reply, output, part
        gc.collect()


def encode_result(job: ResultJob, payload: bytes) -> tuple[CodecReply, bytes]:
    """Encode a result, or return the error."""
    try:
        result = msgspec.msgpack.decode(payload, type=Result)
        return CodecReply(), write(result, job.result_format, job.encoding, len(payload))
    except MemoryError:
        error = "the result takes more memory to write than there is for one"
        return CodecReply(error=BodyError(error=error, status=413)), b""


def decode_body(
    job: BodyJob, packed: bytes, expander: ImageExpander | None
) -> tuple[CodecReply, bytes]:
    """Decode a body to its request in msgpack, or return the error."""
    body = BodyDecoder(job, is_inline=False, expander=expander)
    try:
        content, operation = body.decode(packed)
        request = Request(id=job.request_id, owner=job.owner, operation=operation, seq=content.seq)
        return CodecReply(decoded=content), msgspec.msgpack.encode(request)
    except (ApiError, RequestValidationError) as error:
        return CodecReply(error=to_body_error(error, body.model_and_seq)), b""
    except MemoryError:
        error = "the samples take more memory to decode than there is; send less at once"
        return CodecReply(
            error=BodyError(error=error, status=413, model_and_seq=body.model_and_seq)
        ), b""


def _read_part(source: BinaryIO) -> bytes | None:
    header = source.read(LENGTH)
    if len(header) < LENGTH:
        return None
    length = int.from_bytes(header, "little")
    part = source.read(length)
    return part if len(part) == length else None


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
