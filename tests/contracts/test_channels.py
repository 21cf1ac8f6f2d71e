"""The Channel contract, asked of every channel."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from m2flow import protocols
from m2flow.comm.channel import Channel, Closed
from tests.contracts.channel_suite import WAIT, Background, Case, replay, run, step, until

CASES = [
    Case("fifo", lambda size: Channel("c", capacity=size, producer="rollout", consumer="learner", limit=WAIT)),
    Case(
        "replay",
        replay,
        step,
        lambda batch: int(batch.columns["reward"][0, 0]),
        whole=False,
        keyed=False,
    ),
]
WHOLE = [case for case in CASES if case.whole]
every = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
queues = pytest.mark.parametrize("case", WHOLE, ids=lambda case: case.name)


@every
def test_it_has_the_methods_of_the_protocol(case):
    for method in ("put", "get", "close"):
        assert callable(getattr(case.build(None), method))
        assert hasattr(protocols.Channel, method)


@every
def test_items_are_handed_out_once_and_in_order_of_arrival_when_alike(case):
    channel = case.build(None)
    for n in range(20):
        channel.put(case.item(n))
    got = [case.number(item) for _ in range(20) for item in channel.get(1)]
    if case.whole:
        assert got == list(range(20))
    else:
        assert len(got) == 20
        assert all(number <= n for n, number in enumerate(got))  # drawn from what had been inserted by then
    with pytest.raises(TimeoutError):
        channel.get(1, timeout=0.0)


@every
def test_get_waits_until_the_weight_is_reached(case):
    channel = case.build(None)
    getting = Background(lambda: channel.get(3))
    channel.put(case.item(0))
    channel.put(case.item(1))
    assert getting.waits
    channel.put(case.item(2))
    assert len(getting.result()) == 3


@every
def test_put_waits_while_the_channel_is_full(case):
    channel = case.build(2)
    channel.put(case.item(0))
    channel.put(case.item(1))
    putting = Background(lambda: channel.put(case.item(2)))
    assert putting.waits
    channel.get(1)
    assert putting.result() is None


@every
def test_a_get_for_more_than_the_capacity_is_served(case):
    channel = case.build(2)
    getting = Background(lambda: channel.get(7))
    producer = Background(lambda: [channel.put(case.item(n)) for n in range(7)])
    assert len(getting.result()) == 7
    producer.result()


@every
def test_after_close_what_is_left_comes_and_then_closed(case):
    channel = case.build(None)
    for n in range(3):
        channel.put(case.item(n))
    channel.close()
    channel.close()
    with pytest.raises(Closed):
        channel.put(case.item(3))
    assert len(channel.get(2)) == 2
    assert len(channel.get(2)) == 1  # less than asked for, because nothing more can come
    with pytest.raises(Closed):
        channel.get(1)


@every
def test_close_wakes_blocked_getters_and_putters(case):
    channel = case.build(1)
    getters = [Background(lambda: channel.get(1)) for _ in range(3)]
    assert all(getter.waits for getter in getters)
    channel.close()
    assert all(isinstance(getter.result(), Closed) for getter in getters)
    full = case.build(1)
    full.put(case.item(0))
    putter = Background(lambda: full.put(case.item(1)))
    assert putter.waits
    full.close()
    assert isinstance(putter.result(), Closed)


@every
def test_a22_the_original_exception_reaches_every_waiter_and_every_later_call(case):
    channel, error = case.build(1), ArithmeticError("the producer went wrong")
    waiting = [Background(lambda: channel.get(1)), Background(lambda: run(channel.aget(1)))]
    assert all(w.waits for w in waiting)
    channel.fail(error)
    channel.fail(RuntimeError("a later one does not count"))
    assert [w.result() for w in waiting] == [error, error]
    for call in (lambda: channel.get(1), lambda: channel.put(case.item(0))):
        with pytest.raises(ArithmeticError) as caught:
            call()
        assert caught.value is error


@every
def test_a_timeout_says_who_waited_for_whom_since_when(case):
    channel = case.build(1)
    began = time.monotonic()
    with pytest.raises(
        TimeoutError, match=rf"channel '{channel.name}': {channel.consumer} .*has waited 0\.[0-9] s"
    ) as got:
        channel.get(4, timeout=0.05)
    assert 0.05 <= time.monotonic() - began < 5.0
    for words in ("since ", "get weight 4", channel.producer, "nothing was ever put"):
        assert words in str(got.value)
    channel.put(case.item(0))
    with pytest.raises(TimeoutError, match=f"put weight 1 for {channel.consumer}.*the last put was"):
        channel.put(case.item(1), timeout=0.05)
    with pytest.raises(TimeoutError, match="task "):
        run(channel.aget(4, timeout=0.05))


@every
def test_a_wait_that_timed_out_takes_nothing(case):
    channel = case.build(None)
    with pytest.raises(TimeoutError):
        channel.get(2, timeout=0.01)
    channel.put(case.item(0))
    channel.put(case.item(1))
    assert len(channel.get(2, timeout=1.0)) == 2


@every
def test_one_that_wants_less_is_served_when_one_in_front_gives_up(case):
    channel = case.build(None)
    greedy = Background(lambda: channel.get(5, timeout=0.2))
    until(lambda: len(channel.waiting()) == 1)
    modest = Background(lambda: channel.get(1))
    until(lambda: len(channel.waiting()) == 2)
    channel.put(case.item(0))
    assert isinstance(greedy.result(), TimeoutError)
    assert len(modest.result()) == 1


@every
def test_a22_two_hundred_blocked_getters_and_one_put(case):
    channel = case.build(4)
    getters = [Background(lambda: channel.get(1)) for _ in range(200)]
    until(lambda: len(channel.waiting()) == 200)
    channel.put(case.item(0), timeout=WAIT)
    until(lambda: sum(bool(getter.outcome) for getter in getters) == 1)
    for n in range(1, 200):
        channel.put(case.item(n), timeout=WAIT)
    numbers = [case.number(item) for getter in getters for item in getter.result()]
    assert len(numbers) == 200
    if case.whole:
        assert sorted(numbers) == list(range(200))


@every
def test_coroutines_of_several_loops_and_threads_share_a_channel(case):
    channel, count = case.build(4), 120

    async def consume():
        return [item for _ in range(count // 4) for item in await channel.aget(1)]

    async def produce():
        for n in range(0, count, 2):
            await channel.aput(case.item(n))

    consumers = [Background(lambda: run(consume())) for _ in range(3)]
    consumers.append(Background(lambda: [i for _ in range(count // 4) for i in channel.get(1)]))
    producers = [
        Background(lambda: run(produce())),
        Background(lambda: [channel.put(case.item(n)) for n in range(1, count, 2)]),
    ]
    for producer in producers:
        producer.result()
    numbers = [case.number(item) for consumer in consumers for item in consumer.result()]
    assert len(numbers) == count
    if case.whole:
        assert sorted(numbers) == list(range(count))


@every
def test_a_cancelled_coroutine_loses_nothing(case):
    channel = case.build(None)

    async def cancelled():
        task = asyncio.create_task(channel.aget(1))
        await asyncio.sleep(0)
        channel.put(case.item(0))  # handed over now, yet the task never comes to take it
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(cancelled())
    assert len(channel.get(1, timeout=1.0)) == 1


@every
def test_a_getter_whose_loop_has_ended_loses_nothing(case):
    channel, loop = case.build(None), asyncio.new_event_loop()
    task = loop.create_task(channel.aget(1))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    channel.put(case.item(0))
    assert len(channel.get(1, timeout=1.0)) == 1
    task.get_coro().close()
    task._log_destroy_pending = False


@every
def test_weights_below_one_are_refused(case):
    channel = case.build(None)
    with pytest.raises(ValueError, match="weight must be at least 1, got 0"):
        channel.put(case.item(0), weight=0)
    with pytest.raises(ValueError, match="weight must be at least 1, got -2"):
        channel.get(-2)


@every
def test_state_holds_what_was_not_taken_and_owns_it(case):
    channel = case.build(None)
    for n in range(6):
        channel.put(case.item(n))
    channel.get(2)
    saved = channel.state()
    rest = [case.number(item) for item in channel.get(4)]
    fresh = case.build(None)
    fresh.put(case.item(99))
    fresh.restore(saved)
    assert [case.number(item) for item in fresh.get(4)] == rest
    with pytest.raises(TimeoutError):
        fresh.get(1, timeout=0.0)


@every
def test_restore_serves_those_who_wait(case):
    channel = case.build(None)
    channel.put(case.item(3))
    fresh = case.build(None)
    getting = Background(lambda: fresh.get(1))
    assert getting.waits
    fresh.restore(channel.state())
    assert [case.number(item) for item in getting.result()] == [3]


# ---- keyed queues


@queues
def test_a22_consumers_see_only_their_key_in_order_and_nothing_is_lost(case):
    channel = case.build(16)
    each, keys = 250, "abcd"

    def produce(producer):
        for n in range(each):
            channel.put((producer, n), key=keys[(producer + n) % 4])

    def consume(key):
        return [item for _ in range(each) for item in channel.get(1, key=key, timeout=WAIT)]

    consumers = {key: Background(lambda key=key: consume(key)) for key in keys}
    producers = [Background(lambda p=p: produce(p)) for p in range(4)]
    for producer in producers:
        assert producer.result() is None
    for key, consumer in consumers.items():
        got = consumer.result()
        for producer in range(4):
            mine = [n for p, n in got if p == producer]
            assert mine == [n for n in range(each) if keys[(producer + n) % 4] == key]


@queues
def test_a_full_key_does_not_block_another(case):
    channel = case.build(1)
    channel.put("x", key="a")
    channel.put("y", key="b", timeout=1.0)
    with pytest.raises(TimeoutError, match="of key 'a'"):
        channel.put("z", key="a", timeout=0.01)
    assert channel.get(1, key="b") == ["y"]


@queues
def test_weights_count_and_the_last_item_may_overshoot(case):
    channel = case.build(None)
    channel.put("light", weight=2)
    channel.put("heavy", weight=3)
    with pytest.raises(TimeoutError):
        channel.get(6, timeout=0.0)
    assert sorted(channel.get(4)) == ["heavy", "light"]


@queues
def test_items_that_do_not_fit_exactly_cannot_lock_anybody_out(case):
    channel = case.build(10)
    producer = Background(lambda: [channel.put(n, weight=4) for n in range(30)])
    total = 0
    while total < 30:
        total += len(channel.get(10, timeout=WAIT) if total < 27 else channel.get(4 * (30 - total), timeout=WAIT))
    producer.result()
    assert total == 30


@queues
def test_blocked_putters_enter_in_the_order_they_came(case):
    channel = case.build(1)
    channel.put(0)
    waiting = []
    for n in range(1, 6):
        waiting.append(Background(lambda n=n: channel.put(n)))
        until(lambda n=n: len(channel.waiting()) == n)
    assert [channel.get(1)[0] for _ in range(6)] == list(range(6))
    assert all(w.result() is None for w in waiting)


def test_a_cancelled_get_of_several_items_keeps_their_order():
    channel = Channel("c")
    for n in range(3):
        channel.put(n)

    async def cancelled():
        task = asyncio.create_task(channel.aget(4))
        await asyncio.sleep(0)
        channel.put(3)
        assert channel.size() == 0
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(cancelled())
    channel.put(4)
    assert channel.weight() == 5
    assert channel.get(5) == [0, 1, 2, 3, 4]


def test_many_threads_with_time_outs_and_cancellations_lose_and_double_nothing():
    channel, count = Channel("c", capacity=3, limit=WAIT), 600
    got: list[int] = []
    lock, stop = threading.Lock(), threading.Event()

    def impatient():
        while not stop.is_set():
            try:
                items = channel.get(2, timeout=0.0005)
            except TimeoutError:
                continue
            with lock:
                got.extend(items)

    async def fickle():
        while not stop.is_set():
            task = asyncio.create_task(channel.aget(1))
            await asyncio.sleep(0.0003)
            task.cancel()
            result = (await asyncio.gather(task, return_exceptions=True))[0]
            if isinstance(result, list):
                with lock:
                    got.extend(result)

    consumers = [Background(impatient) for _ in range(3)] + [
        Background(lambda: asyncio.run(fickle())) for _ in range(2)
    ]
    producers = [Background(lambda p=p: [channel.put(n) for n in range(p, count, 3)]) for p in range(3)]
    for producer in producers:
        assert len(producer.result()) == count // 3
    until(lambda: len(got) >= count - 1)
    stop.set()
    assert all(consumer.result() is None for consumer in consumers)
    channel.close()
    left = channel.get(count) if len(got) < count else []
    assert sorted([*got, *left]) == list(range(count))
