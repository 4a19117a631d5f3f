"""An engine that answers from a table, so that the HTTP side is tested with nothing behind it."""

import asyncio
import contextlib
import threading
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import httpx
import numpy as np
import uvicorn

from penstock.server.api.app import create_app
from penstock.server.api.http_protocol import Connection
from penstock.server.api.settings import ApiSettings
from penstock.server.protocol import codec, envelopes, requests, results
from penstock.server.protocol.codec import PeerLostError
from penstock.server.protocol.envelopes import FromScheduler, ToScheduler
from penstock.server.protocol.types import Array, Checkpoint, LoraConfig, ModelInfo, SampledSequence
from tests.server.in_process_channel import memory_pair

MODEL = "sess-1:train:0"
READY = envelopes.Status(workers="ready")


def served(**facts):
    return results.ServedModel(
        **{
            "base_model": "tiny/byte-llama",
            "tokenizer": "builtin:bytes",
            "arch": "llama",
            "max_context": 2048,
            "trains": "adapters",
            "max_rank": 16,
            "samples": True,
        }
        | facts
    )


def passed(work):
    """Of every token, and each of its targets, a log-probability that says which sample and token
    it is."""
    outputs = []
    for index, datum in enumerate(work.data):
        targets = datum.inputs["target_tokens"].numpy()
        tokens = np.broadcast_to(datum.tokens.numpy(), targets.T.shape).T
        outputs.append({"logprobs": Array.of(-(index + 1) - tokens / 1000, "float32")})
    total = sum(float(-output["logprobs"].numpy().sum()) for output in outputs)
    return results.ForwardBackwardResult(outputs=tuple(outputs), metrics={"loss:sum": total})


def sampled(work):
    count = work.sampling.max_tokens or 4
    tokens, logprobs = likeliest(count, work.topk_sample_logprobs)
    one = SampledSequence(
        stop_reason="length",
        tokens=Array.of(np.arange(count), "int32"),
        logprobs=Array.of(np.full(count, -0.5), "float32"),
        topk_tokens=tokens,
        topk_logprobs=logprobs,
    )
    length = work.prompt.shape[0]
    prompt = np.arange(length, dtype=np.float32) * -0.25
    prompt[:1] = np.nan
    tokens, logprobs = likeliest(length, work.topk_prompt_logprobs, foretold=1)
    return results.SampleResult(
        sequences=(one,) * work.count,
        prompt_logprobs=Array.of(prompt, "float32") if work.prompt_logprobs else None,
        topk_prompt_tokens=tokens,
        topk_prompt_logprobs=logprobs,
    )


def likeliest(length, count, foretold=0):
    """`count` tokens in each place, of which nothing foretells those before `foretold`."""
    if not count:
        return None, None
    places = np.arange(length)[:, None]
    is_foretold = places >= foretold
    tokens = np.where(is_foretold, np.arange(count)[None], -1)
    logprobs = np.where(is_foretold, -1.0 - np.arange(count)[None], np.nan)
    return Array.of(tokens, "int32"), Array.of(logprobs, "float32")


def run_of(model):
    return ModelInfo(
        model=model,
        base_model="tiny/byte-llama",
        rank=8,
        last_request=1_700_000_000.0,
        last_checkpoint=checkpoint(model),
    )


def checkpoint(model=MODEL, name="weights/ck1", time=1_700_000_000.0):
    kind = "training" if name.startswith("weights") else "sampler"
    said = {"of": "a test"}
    return Checkpoint(name=name, model=model, kind=kind, time=time, size=1234, user_metadata=said)


def _made(work):
    return results.CreateModelResult(model=work.model)


def _saved(work):
    return results.SaveResult(model=work.model, name=f"weights/{work.name or 'by-time'}")


def _saved_sampler(work):
    name = f"sampler_weights/{work.name or 'unnamed'}"
    sampler = None if work.number is None else f"{work.session}:sample:{work.number}"
    return results.SaveResult(model=work.model, name=name, sampler=sampler)


def _endpoints(work):
    endpoint = getattr(work, "endpoint", None)
    return results.EndpointsResult(endpoints=(endpoint,) if endpoint else ())


def _sampler_made(work):
    name = f"{work.session}:sample:{work.number}"
    return results.SamplerResult(sampler=name, base_model="tiny/byte-llama", path=work.path)


def _synced(_):
    return results.SyncWeightsResult(
        num_parameters=2, total_bytes=64, num_buckets=1, seconds=0.5, endpoints=()
    )


TABLE = {
    requests.CreateSession: lambda work: results.CreateSessionResult(
        session=work.session or "sess-1"
    ),
    requests.Heartbeat: lambda _: results.HeartbeatResult(),
    requests.EndSession: lambda _: results.Done(),
    requests.ListSessions: lambda _: results.ListSessionsResult(sessions=("sess-1",)),
    requests.GetSession: lambda work: results.SessionResult(
        session=work.session, models=(MODEL,), samplers=("sess-1:sample:0",)
    ),
    requests.GetCapabilities: lambda _: served(),
    requests.CreateModel: _made,
    requests.UnloadModel: lambda _: results.Done(),
    requests.ForwardBackward: passed,
    requests.OptimStep: lambda work: results.OptimStepResult(
        metrics={"grad_norm": 1.5, "learning_rate": work.adam.learning_rate, "step": 1.0}
    ),
    requests.ZeroGrad: lambda _: results.Done(),
    requests.SaveState: _saved,
    requests.LoadState: lambda work: results.CreateModelResult(model=work.model),
    requests.SaveSamplerWeights: _saved_sampler,
    requests.SyncWeights: _synced,
    requests.CreateSampler: _sampler_made,
    requests.GetSampler: lambda work: results.SamplerResult(
        sampler=work.sampler, base_model="tiny/byte-llama", path=f"{MODEL}/sampler_weights/s1"
    ),
    requests.Sample: sampled,
    requests.GetModel: lambda work: results.ModelResult(
        info=run_of(work.model), served=served(), pending=0
    ),
    requests.ListModels: lambda _: results.ListModelsResult(models=(run_of(MODEL),), total=1),
    requests.ListCheckpoints: lambda work: results.ListCheckpointsResult(
        checkpoints=(checkpoint(work.model or MODEL), checkpoint(name="sampler_weights/s1"))
    ),
    requests.DeleteCheckpoint: lambda _: results.Done(),
    requests.UpdateCheckpoint: lambda _: results.Done(),
    requests.GetCheckpoint: lambda work: results.CheckpointResult(
        base_model="tiny/byte-llama",
        lora=LoraConfig(rank=8, alpha=16.0, train_mlp=False),
        checkpoint=checkpoint(work.path.split("/")[0], work.path.split("/", 1)[1]),
    ),
    requests.AddEndpoint: _endpoints,
    requests.RemoveEndpoint: _endpoints,
    requests.ListEndpoints: _endpoints,
}
"""What becomes of each work; None: it is not answered."""


class Engine:
    """Answers at once, or never."""

    def __init__(self, end, table):
        self.end = end
        self.table = TABLE | (table or {})
        self.asks = []
        self.cancelled = []
        self.hellos = []
        self.loop: Any = None
        self.app: Any = None

    def works(self, kind):
        return [ask.operation for ask in self.asks if isinstance(ask.operation, kind)]

    async def run(self):
        self.loop = asyncio.get_running_loop()
        while True:
            try:
                codec = await self.end.receive()
            except PeerLostError:
                continue
            match codec:
                case envelopes.Hello(instance=instance):
                    self.hellos.append(instance)
                    await self.end.send(READY)
                case envelopes.Cancel(id=name):
                    self.cancelled.append(name)
                    await self.end.send(failure("it was cancelled", "cancelled", name=name))
                case ask:
                    self.asks.append(ask)
                    result = self.table[type(ask.operation)](ask.operation)
                    if result is not None:
                        await self.answer(ask, result)

    async def answer(self, ask, result):
        if isinstance(result, envelopes.Failure):
            await self.end.send(failure(result.error, result.code, name=ask.id))
        else:
            await self.end.send(envelopes.Response(id=ask.id, result=result))


def failure(error, code: codec.Code = "invalid", *, name=""):
    return envelopes.Failure(id=name, error=error, category="user", code=code)


def never(_):
    return None


@asynccontextmanager
async def application(table=None, **settings):
    """The application and its engine, in this event loop."""
    ours, theirs = memory_pair(ToScheduler, FromScheduler)
    app = create_app(ours, ApiSettings(**{"poll_seconds": 0.05, **settings}))
    engine = Engine(theirs, table)
    task = asyncio.create_task(engine.run())
    async with app.router.lifespan_context(app):
        await heard_of(app)
        yield app, engine
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def heard_of(app):
    async with asyncio.timeout(5):
        while app.state.service.scheduler.status is None:
            await asyncio.sleep(0.005)


@asynccontextmanager
async def client(table=None, *, headers=None, **settings):
    """A client of the application, without a socket between them."""
    async with application(table, **settings) as (app, engine):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)

        async def settle(_):
            # What was handed over has arrived before a test looks for it.
            while not engine.end._arrived.empty():
                await asyncio.sleep(0)

        hooks = {"response": [settle]}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", headers=headers, event_hooks=hooks
        ) as http:
            engine.app = app
            yield http, engine


@contextmanager
def listening(table=None, **settings):
    """The application behind a port of this machine, in a thread; its address and its engine."""
    there = threading.Event()
    state = {}

    async def serve():
        async with application(table, **settings) as (app, engine):
            # The application's own start and end are those of the loop around it.
            connections = app.state.service.connections
            protocol: Any = partial(Connection, connections)
            config = uvicorn.Config(
                app, port=0, log_level="warning", lifespan="off", http=protocol, ws="none"
            )
            server = state["server"] = uvicorn.Server(config)
            serving = asyncio.create_task(server.serve())
            while not server.started:
                await asyncio.sleep(0.01)
            state["port"] = server.servers[0].sockets[0].getsockname()[1]
            state["engine"] = engine
            there.set()
            await serving

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert there.wait(20)
    yield f"http://127.0.0.1:{state['port']}", state["engine"]
    state["server"].should_exit = True
    thread.join(20)
