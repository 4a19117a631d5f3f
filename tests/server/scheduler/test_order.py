"""Works of a model run in the order of their numbers, each once; and nobody starves."""

import asyncio
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.server.protocol.requests import OptimStep, Sample, ZeroGrad
from penstock.server.protocol.results import Done, OptimStepResult
from penstock.server.protocol.types import AdamParams, Array
from penstock.server.protocol.worker_commands import ForwardBackwardCommand, GenerateCommand
from penstock.server.scheduler import queue as queues
from penstock.server.scheduler.errors import RequestError
from penstock.server.scheduler.queue import MAX_OUTCOMES, RequestQueue, Task
from tests.server.engine_house import a_pass, a_step, house, sampling


def errand(model, seq, name="x"):
    return Task(OptimStep(model=model, adam=AdamParams()), "one", model, seq, [name])


def drawing(name="x"):
    prompt = Array.of([1], "int32")
    return Task(Sample(prompt=prompt, sampling=sampling()), "one", None, None, [name])


def drain(queue):
    done = []
    while (taken := queue.take()) is not None:
        done.append(taken)
        queue.end(taken, Done())
    return done


@st.composite
def arrivals(draw):
    """Every number of a few models at least once, in any order, with works of none between."""
    counts = draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
    each = [(f"m{m}", seq) for m, count in enumerate(counts) for seq in range(1, count + 1)]
    again = draw(st.lists(st.sampled_from(each), max_size=8))
    others = draw(st.lists(st.sampled_from(["m0", None]), max_size=4))
    asked = draw(st.permutations([*each, *again, *((model, None) for model in others)]))
    return asked, draw(st.lists(st.booleans(), min_size=len(asked), max_size=len(asked)))


@given(arrivals())
@settings(max_examples=60, deadline=None)
def test_whatever_comes_when_each_number_is_done_once_and_in_order(case):
    asked, works = case
    queue, done, told = RequestQueue(30.0), [], defaultdict(int)

    def work():
        if (taken := queue.take()) is not None:
            done.append((taken.model, taken.seq))
            queue.end(taken, Done())
            for name in taken.request_ids:
                told[name] += 1

    for index, ((model, seq), works_now) in enumerate(zip(asked, works, strict=True)):
        new = drawing(str(index)) if model is None else errand(model, seq, str(index))
        if not isinstance(queue.put(new), Task):
            told[str(index)] += 1
        if works_now:
            work()
    for _ in asked:
        work()
    assert len(queue) == 0
    assert all(told[str(index)] == 1 for index in range(len(asked)))
    for model in {model for model, _ in asked if model}:
        numbers = [seq for name, seq in done if name == model and seq is not None]
        assert numbers == sorted({seq for name, seq in asked if name == model and seq is not None})


@given(st.lists(st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=30))
@settings(max_examples=50, deadline=None)
def test_of_what_may_begin_the_one_that_came_first_does(asked):
    queue, numbers = RequestQueue(30.0), defaultdict(int)
    for index, model in enumerate(asked):
        numbers[model] += 1
        seq = numbers[model]
        queue.put(drawing(str(index)) if model is None else errand(model, seq, str(index)))
    assert [taken.request_ids for taken in drain(queue)] == [[str(n)] for n in range(len(asked))]


def test_a_model_with_much_to_do_does_not_hold_up_another():
    queue = RequestQueue(30.0)
    for seq in range(1, 101):
        queue.put(errand("busy", seq))
    taken = queue.take()
    queue.put(errand("other", 1, "other"))
    for seq in range(101, 201):
        queue.put(errand("busy", seq))
    assert taken is not None
    queue.end(taken, Done())
    assert [found.model for found in drain(queue)].index("other") == 99


def test_a_work_without_a_number_runs_after_those_that_came_before_it():
    queue = RequestQueue(30.0)
    for seq, name in ((2, "second"), (None, "save"), (1, "first"), (3, "third")):
        queue.put(errand("m", seq, name))
    assert [taken.request_ids[0] for taken in drain(queue)] == ["first", "second", "save", "third"]


def test_a_gap_is_waited_for_and_then_given_up_by_the_one_that_waits():
    queue = RequestQueue(10.0)
    queue.put(errand("m", 1))
    drain(queue)
    waits = errand("m", 3, "waits")
    queue.put(waits)
    queue.put(errand("m", 4, "next"))
    assert list(queue.pop_overdue(100.0)) == []
    assert list(queue.pop_overdue(109.0)) == []
    [overdue] = queue.pop_overdue(110.0)
    assert overdue is waits
    assert overdue.outcome is not None
    assert overdue.outcome.code == "invalid"
    assert "number 3" in str(overdue.outcome)
    assert "number 2" in str(overdue.outcome)
    assert [taken.request_ids for taken in drain(queue)] == [["next"]]
    with pytest.raises(RequestError, match="number 2 of model m is past"):
        queue.put(errand("m", 2))


def test_a_gap_that_is_filled_in_time_is_none():
    queue = RequestQueue(10.0)
    queue.put(errand("m", 2))
    assert list(queue.pop_overdue(0.0)) == []
    queue.put(errand("m", 1))
    assert list(queue.pop_overdue(20.0)) == []
    assert [taken.seq for taken in drain(queue)] == [1, 2]


def test_what_was_done_is_answered_from_what_was_kept_and_not_done_again():
    queue = RequestQueue(30.0)
    queue.put(errand("m", 1))
    taken = queue.take()
    assert taken is not None
    joined = errand("m", 1, "again")
    assert queue.put(joined) is taken
    assert taken.request_ids == ["x", "again"]
    result = OptimStepResult(metrics={"step": 1.0})
    queue.end(taken, result)
    assert queue.put(errand("m", 1)) is result
    assert drain(queue) == []


def test_one_number_is_not_given_to_two_kinds_of_work():
    queue = RequestQueue(30.0)
    queue.put(errand("m", 1))
    other = Task(ZeroGrad(model="m"), "one", "m", 1, ["y"])
    with pytest.raises(RequestError, match="number 1 of model m is a OptimStep already"):
        queue.put(other)
    drain(queue)
    with pytest.raises(RequestError, match="number 1 of model m is a OptimStep already"):
        queue.put(other)


def test_only_so_many_outcomes_are_kept():
    queue = RequestQueue(30.0)
    for seq in range(1, MAX_OUTCOMES + 3):
        queue.put(errand("m", seq))
    drain(queue)
    assert isinstance(queue.put(errand("m", 3)), Done)
    with pytest.raises(RequestError, match="not kept any more"):
        queue.put(errand("m", 2))


def test_what_is_cancelled_before_it_begins_is_not_done_and_leaves_no_gap():
    queue = RequestQueue(30.0)
    for seq in (1, 2, 3):
        queue.put(errand("m", seq, str(seq)))
    cancelled = RequestError("cancelled", "it was cancelled")
    assert queue.cancel("2", cancelled) is not None
    assert len(queue) == 2
    assert [taken.seq for taken in drain(queue)] == [1, 3]
    assert queue.put(errand("m", 2)) is cancelled


def test_who_joined_a_work_keeps_it_when_the_other_cancels():
    queue = RequestQueue(30.0)
    queue.put(errand("m", 1, "a"))
    queue.put(errand("m", 1, "b"))
    assert queue.cancel("a", RequestError("cancelled", "it was cancelled")) is None
    assert [taken.request_ids for taken in drain(queue)] == [["b"]]


def test_another_api_may_ask_again_in_any_order_for_what_the_first_had_asked():
    queue = RequestQueue(30.0)
    for seq in (1, 2, 3):
        queue.put(errand("m", seq))
    first = queue.take()
    assert first is not None
    queue.end(first, Done())
    assert len(queue.drop_waiting()) == 2
    queue.put(errand("m", 3, "late"))
    assert queue.take() is None
    queue.put(errand("m", 2, "again"))
    assert [taken.seq for taken in drain(queue)] == [2, 3]


def test_where_numbers_were_lost_with_who_asked_for_them_the_lowest_there_is_goes_on():
    queue = RequestQueue(30.0)
    queue.put(errand("m", 1))
    drain(queue)
    queue.drop_waiting()
    queue.put(errand("m", 5))
    assert list(queue.pop_overdue(0.0)) == []
    assert list(queue.pop_overdue(2.0)) == []
    assert [taken.seq for taken in drain(queue)] == [5]


def test_another_queue_knows_what_was_done_and_the_last_of_how_it_ended(monkeypatch):
    monkeypatch.setattr(queues, "MAX_SHUTDOWN_STATE_BYTES", 2 * 1024)
    queue, other = RequestQueue(30.0), RequestQueue(30.0)
    for seq in (1, 2, 3, 4):
        queue.put(errand("m", seq))
    drain(queue)
    queue.put(errand("m", 6))
    other.restore("m", queue.left()["m"])
    assert isinstance(other.put(errand("m", 4)), Done)
    assert isinstance(other.put(errand("m", 3)), Done)
    with pytest.raises(RequestError, match="the next is 5"):
        other.put(errand("m", 2))
    with pytest.raises(RequestError, match="is a OptimStep already"):
        other.put(Task(ZeroGrad(model="m"), "one", "m", 4, ["y"]))
    other.put(errand("m", 6))
    assert other.take() is None
    other.put(errand("m", 5))
    assert [taken.seq for taken in drain(other)] == [5, 6]


def test_models_share_the_room_for_what_is_left_and_each_leaves_its_last(monkeypatch):
    monkeypatch.setattr(queues, "MAX_SHUTDOWN_STATE_BYTES", 6 * 1024)
    queue = RequestQueue(30.0)
    for models, count in ((2, 3), (3, 2), (8, 1)):
        for number in range(models):
            for seq in (1, 2, 3):
                queue.put(errand(f"{number} of {models}", seq))
        drain(queue)
        kept = [[each.seq for each in its.ended] for its in queue.left().values()]
        assert kept == [[1, 2, 3][-count:]] * models
        for number in range(models):
            queue.forget(f"{number} of {models}")


def test_clients_are_answered_in_order_whatever_order_they_ask_in(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await here.client.begin()
            asked = [
                await here.client.ask(a_step(), 4),
                await here.client.ask(a_pass("m", 3), 3),
                await here.client.ask(a_step(), 2),
                await here.client.ask(a_pass("m", 5), 1),
                await here.client.ask(a_pass("m", 5), 1),
            ]
            ended = await asyncio.gather(*asked)
            assert ended[0].metrics["learnt"] == 8
            assert ended[2].metrics["learnt"] == 5
            assert ended[3] == ended[4]
            kinds = [
                type(order)
                for order in here.workers.orders
                if isinstance(order, ForwardBackwardCommand | OptimStep)
            ]
            assert kinds == [
                ForwardBackwardCommand,
                OptimStep,
                ForwardBackwardCommand,
                OptimStep,
            ]

    asyncio.run(check())


def test_what_cannot_be_done_fails_at_once_and_its_number_is_used_up(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await here.client.begin()
            wrong = await here.client.fails(a_pass("m", 4, 33), 2)
            assert wrong.code == "invalid"
            assert "sample 1 has 33 tokens" in wrong.error
            await here.client.do(a_pass("m", 4), 1)
            assert (await here.client.do(a_pass("m", 4), 3)).metrics["loss:sum"] == 4
            again = await here.client.fails(a_pass("m", 4), 2)
            assert again.error == wrong.error

    asyncio.run(check())


def test_a_gap_fails_the_ask_that_waits_and_order_goes_on(tmp_path):
    async def check():
        async with house(tmp_path, sequence_gap_timeout=0.1) as here:
            await here.client.begin()
            failed = await here.client.fails(a_pass(), 2)
            assert (failed.category, failed.code) == ("user", "invalid")
            await here.client.do(a_pass(), 3)

    asyncio.run(check())


def test_what_a_gone_api_had_asked_for_is_not_begun(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await here.client.hello("first")
            await here.client.begin()
            here.workers.slowly = 0.05
            for seq in (1, 2, 3):
                await here.client.ask(a_pass(), seq)
            await here.client.hello("second")
            # The one under way is joined; the others are asked for again, in another order.
            third = await here.client.ask(a_step(), 3)
            await here.client.do(a_pass(), 1)
            await here.client.do(a_pass(), 2)
            assert (await third).metrics["learnt"] == 8

    asyncio.run(check())


def test_a_drawing_that_fails_is_no_failure_of_those_that_were_drawn_with_it(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            here.workers.fails = lambda order: any(each.count == 3 for each in order.samples)
            prompt = Array.of([1], "int32")
            asked = [
                await here.client.ask(Sample(prompt=prompt, sampling=sampling(), count=count))
                for count in (2, 3, 4)
            ]
            first, second, third = await asyncio.gather(*asked)
            assert [len(first.sequences), len(third.sequences)] == [2, 4]
            assert (second.category, second.code) == ("user", "not_found")

    asyncio.run(check())


def test_what_is_refused_by_workers_has_changed_nothing_and_uses_up_its_number(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await here.client.begin()
            here.workers.fails = lambda order: isinstance(order, OptimStep)
            await here.client.do(a_pass(), 1)
            assert (await here.client.fails(a_step(), 2)).error == "this order is refused"
            here.workers.fails = lambda _: False
            assert (await here.client.fails(a_step(), 2)).error == "this order is refused"
            assert (await here.client.do(a_step(), 3)).metrics == {"step": 1, "learnt": 4}

    asyncio.run(check())


def test_requests_to_sample_from_the_same_join_the_one_that_runs_but_none_that_waits_longer(
    tmp_path,
):
    async def check():
        async with house(tmp_path) as here:
            await here.client.begin()
            here.workers.orders.clear()
            here.workers.slowly = 0.1
            queued = []
            # Asked when an order is about to end.
            here.workers.fails = lambda _: bool(queued.append(here.workers.end.queued))
            prompt = Array.of([1, 2], "int32")
            asked = [
                await here.client.ask(operation, seq)
                for operation, seq in [
                    (Sample(prompt=prompt, sampling=sampling(), count=1), None),
                    (Sample(prompt=prompt, sampling=sampling(), count=2), None),
                    (a_pass(), 1),
                    (Sample(prompt=prompt, sampling=sampling(), count=3), None),
                ]
            ]
            first, second, _, last = [await future for future in asked]
            sampled = [len(result.sequences) for result in (first, second, last)]
            assert sampled == [1, 2, 3]
            orders = [type(order) for order in here.workers.orders]
            generate = [GenerateCommand] * 2
            assert orders == [*generate, ForwardBackwardCommand, GenerateCommand]
            assert queued == [1, 0, 0, 0]

    asyncio.run(check())
