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
from penstock.server.api.wire.codec_pool import LENGTH, READY, CodecJob, CodecReply
from penstock.server.api.wire.request_bodies import BodyDecoder, BodyError, BodyJob, to_body_error
from penstock.server.api.wire.response_bodies import ResultJob, write
from penstock.server.protocol.envelopes import Request
from penstock.server.protocol.results import Result


def main(parent: int, memory: int) -> None:
    """Run jobs until the input ends. `memory`: limit of this process's data segment in bytes."""
    end_with_parent(parent)
    os.write(sys.stdout.fileno(), READY)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    jobs = os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=1 << 20)
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # One job has millions of live objects, over which a garbage collection takes seconds.
    gc.freeze()
    gc.disable()
    while (said := _part(jobs)) is not None:
        job = msgspec.msgpack.decode(said, type=CodecJob)
        given = _part(jobs)
        if given is None:
            return
        reply, made = decoded(job, given) if isinstance(job, BodyJob) else encoded(job, given)
        del given
        for part in (msgspec.msgpack.encode(reply), made):
            replies.write(len(part).to_bytes(LENGTH, "little"))
            replies.write(part)
        replies.flush()
        del reply, made, part
        gc.collect()


def encoded(job: ResultJob, given: bytes) -> tuple[CodecReply, bytes]:
    """Encode a result, or return the error."""
    try:
        result = msgspec.msgpack.decode(given, type=Result)
        return CodecReply(), write(result, job.shape, job.form, len(given))
    except MemoryError:
        error = "the result takes more memory to write than there is for one"
        return CodecReply(refused=BodyError(error=error, status=413)), b""


def decoded(job: BodyJob, packed: bytes) -> tuple[CodecReply, bytes]:
    """Decode a body to its request in msgpack, or return the error."""
    body = BodyDecoder(job, is_inline=False)
    try:
        said, operation = body.decode(packed)
        request = Request(id=job.request_id, owner=job.owner, operation=operation, seq=said.seq)
        return CodecReply(decoded=said), msgspec.msgpack.encode(request)
    except (ApiError, RequestValidationError) as error:
        return CodecReply(refused=to_body_error(error, body.model_and_seq)), b""
    except MemoryError:
        error = "the samples take more memory to decode than there is; send less at once"
        return CodecReply(
            refused=BodyError(error=error, status=413, model_and_seq=body.model_and_seq)
        ), b""


def _part(source: BinaryIO) -> bytes | None:
    said = source.read(LENGTH)
    if len(said) < LENGTH:
        return None
    length = int.from_bytes(said, "little")
    found = source.read(length)
    return found if len(found) == length else None


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
