"""A worker: one thread or process that hosts stages and services, and talks to its peers over links.

Messages on a link are tuples: (kind, ...). A reader thread per link hands them to the worker's event loop; only
questions
about the worker's own health are answered by the reader itself, so that a stuck worker can still say where it is stuck.

    tick stage Tick | item dst Entry | end dst Entry | weights service Weights | call id service method args
    reply id ok value | granted stage | state id | restore id states | go step | status id | stop
    to the driver: ready | loaded service rank version | report stage rank Report | spans list | acquire/release |
    failed
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import socket
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from m2flow.comm.channel import Channel, Closed
from m2flow.comm.weights import verify
from m2flow.flow.graph import Call, Flow, Stream
from m2flow.flow.graph import Weights as WeightsEdge
from m2flow.flow.plan import Plan
from m2flow.protocols import Closes, Resident, Stateful, Transport
from m2flow.runtime.loop import Entry, Host
from m2flow.runtime.wiring import DRIVER, Wiring, WorkerSpec, producers, targets
from m2flow.types import Report, Trajectory, Weights

Part = Callable[["Context"], Any]


@dataclass(frozen=True, slots=True)
class Context:
    """What a part may know when it builds its stage: which replica it is, its devices, and handles of its services."""

    name: str
    rank: int
    size: int
    devices: tuple[str, ...]
    services: Mapping[str, Any] = field(default_factory=dict)
    sub_batches: int = 1


@dataclass(frozen=True, slots=True)
class Program:
    """Everything a worker needs: what happens, where, and how each node is built. Picklable."""

    flow: Flow
    plan: Plan
    wiring: Wiring
    parts: Mapping[str, Part]  # node name, or "src->dst" for the sampling rule of a replay stream
    wait_limit: float = 600.0


class LocalHandle:
    """A service in the same worker: an awaitable call is a function call."""

    def __init__(self, service: Any) -> None:
        self._service = service

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        function: Callable[..., Any] = getattr(self._service, method)

        async def call(*args: Any) -> Any:
            return function(*args)

        setattr(self, method, function if inspect.iscoroutinefunction(function) else call)
        return getattr(self, method)  # type: ignore[no-any-return]


class RemoteHandle:
    """A service elsewhere: the call travels over the link and comes back as a reply."""

    def __init__(self, worker: Worker, peer: str, service: str) -> None:
        self._worker, self._peer, self._service = worker, peer, service

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any) -> Any:
            return await self._worker.ask(self._peer, self._service, method, args)

        setattr(self, method, call)
        return call


class Worker:
    """Hosts the nodes of `spec`. `run` returns when the driver says stop or goes away."""

    def __init__(self, spec: WorkerSpec, program: Program, links: Mapping[str, Transport]) -> None:
        self.spec, self.program, self.links = spec, program, links
        self.nodes: dict[str, Any] = {}
        self.hosts: dict[str, Host] = {}
        self.pending: dict[int, asyncio.Future[Any]] = {}
        self.turns: dict[str, asyncio.Future[None]] = {}
        self.ids = itertools.count()
        self.tasks: set[asyncio.Task[None]] = set()

    def run(self) -> None:
        """Build the nodes, then serve until stopped."""
        asyncio.run(self._main())

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.stopped = asyncio.Event()
        readers = [
            threading.Thread(target=self._read, args=(peer, link), name=f"{self.spec.id}<-{peer}", daemon=True)
            for peer, link in self.links.items()
        ]
        try:
            self._build()
            self._tell("ready", self.spec.id, os.getpid())
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - reported to the driver as this worker's failure
            self._fail(self.spec.nodes[0], error)
        for reader in readers:
            reader.start()
        await self.stopped.wait()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for node in self.nodes.values():
            if isinstance(node, Closes):
                node.close()
        for link in self.links.values():
            link.close()

    # ---- building

    def _build(self) -> None:
        flow, kinds = self.program.flow, {node.name: node.kind for node in self.program.flow.nodes}
        for name in sorted(self.spec.nodes, key=lambda name: kinds[name] == "stage"):
            services = {e.dst: self._handle(e) for e in flow.edges if isinstance(e, Call) and e.src == name}
            cuts = [self.program.plan.sub_batches.get(f"{name}->{service}", 1) for service in services]
            context = Context(name, self.spec.rank, self.spec.size, self.spec.devices, services, max(cuts, default=1))
            node = self.nodes[name] = self.program.parts[name](context)
            if self.program.plan.places[name].offload and not isinstance(node, Resident):
                raise TypeError(f"{name}: its node is resident, but {type(node).__name__} lacks onload or offload")
            if kinds[name] == "stage":
                self.hosts[name] = self._host(name, context)

    def _handle(self, edge: Call) -> Any:
        [rank] = targets(edge, self.spec.rank, self.program.plan)
        peer = self.program.wiring.worker(edge.dst, rank)
        return LocalHandle(self.nodes[edge.dst]) if peer == self.spec.id else RemoteHandle(self, peer, edge.dst)

    def _host(self, name: str, context: Context) -> Host:
        flow, plan, rank = self.program.flow, self.program.plan, self.spec.rank
        incoming = [e for e in flow.edges if isinstance(e, Stream) and e.dst == name]
        samplers = [self.program.parts[f"{e.src}->{e.dst}"] for e in incoming if e.channel == "replay"]
        taking_turns = (name, rank) in self.program.wiring.leases
        return Host(
            name=name,
            rank=rank,
            stage=self.nodes[name],
            device=",".join(self.spec.devices),
            # Without a capacity, yet bounded: the driver admits a step only behind at most `lag` unfinished ones, so
            # what is here is of lag + 1 steps at most. A full inbox would stop the very loop that empties it.
            inbox=Channel(
                f"inbox of {name}/{rank}",
                producer=" and ".join(sorted(f"{who}/{r}" for who, r in producers(flow, plan, name, rank))) or DRIVER,
                consumer=f"{name}/{rank}",
            ),
            producers=producers(flow, plan, name, rank),
            chunk=min((plan.chunks.get(f"{e.src}->{e.dst}", 1) for e in incoming), default=1),
            emit=lambda output, step: self._emit(name, output, step),
            end=lambda step, kind: self._end(name, step, kind),
            acquire=(lambda: self._acquire(name)) if taking_turns else None,
            release=(lambda: self._release(name)) if taking_turns else None,
            sampler=samplers[0](context) if samplers else None,
        )

    # ---- outputs

    async def _emit(self, name: str, output: Any, step: int) -> None:
        """Weights go along weights edges, reports to the driver, everything else along streams."""
        edges, plan, rank = self.program.flow.edges, self.program.plan, self.spec.rank
        if isinstance(output, Report):
            self._tell("report", name, rank, output)
        elif isinstance(output, Weights):
            for edge in edges:
                if isinstance(edge, WeightsEdge) and edge.src == name:
                    for target in targets(edge, rank, plan):
                        self._post(self.program.wiring.worker(edge.dst, target), ("weights", edge.dst, output))
        else:
            self._stream(name, Entry((name, rank), step, output))

    async def _end(self, name: str, step: int, kind: str) -> None:
        if kind == "step":
            self._stream(name, Entry((name, self.spec.rank), step, end=True))
        host = self.hosts[name]
        if host.spans:
            self._tell("spans", host.spans)
            host.spans = []
        self._tell("ended", name, self.spec.rank, step, kind)
        await asyncio.sleep(0)

    def _stream(self, name: str, entry: Entry) -> None:
        for edge in self.program.flow.edges:
            if isinstance(edge, Stream) and edge.src == name:
                for target in targets(edge, self.spec.rank, self.program.plan):
                    peer = self.program.wiring.worker(edge.dst, target)
                    self._post(peer, ("item", edge.dst, entry.producer, entry.step, entry.item, entry.end))

    def _post(self, peer: str, message: tuple[Any, ...]) -> None:
        if peer == self.spec.id:
            self._dispatch(message)
        else:
            self.links[peer].send(message, timeout=self.program.wait_limit)

    def _tell(self, *message: Any) -> None:
        self.links[DRIVER].send(message, timeout=self.program.wait_limit)

    # ---- waiting

    async def ask(self, peer: str, service: str, method: str, args: tuple[Any, ...]) -> Any:
        """Call a service in another worker. The limit of the wait is the program's."""
        number = next(self.ids)
        future = self.pending[number] = self.loop.create_future()
        self._post(peer, ("call", number, self.spec.id, service, method, args))
        try:
            return await asyncio.wait_for(future, self.program.wait_limit)
        except TimeoutError:
            raise TimeoutError(
                f"{self.spec.id} has waited {self.program.wait_limit:.0f} s for {service}.{method} in {peer}"
            ) from None
        finally:
            del self.pending[number]

    async def _acquire(self, name: str) -> None:
        turn = self.turns[name] = self.loop.create_future()
        self._tell("acquire", f"{name}/{self.spec.rank}", list(self.program.wiring.leases[name, self.spec.rank]))
        await turn
        self._switch(name, "onload")

    def _release(self, name: str) -> None:
        self._switch(name, "offload")
        self._tell("release", f"{name}/{self.spec.rank}")

    def _switch(self, name: str, how: str) -> None:
        """Change of lease: a stage whose place says `offload` leaves the devices at the end of its turn, and comes
        back."""
        called = [edge.dst for edge in self.program.flow.calls_of(name) if edge.dst in self.nodes]
        for node in (name, *called):
            if self.program.plan.places[node].offload:
                getattr(self.nodes[node], how)()

    # ---- messages

    def _read(self, peer: str, link: Transport) -> None:
        while True:
            try:
                message = link.recv()
            except Closed:
                self._call_soon(self._gone, peer)
                return
            except Exception as error:  # noqa: BLE001 - a message that cannot be read is this worker's failure
                self._fail(f"link from {peer}", error)
                return
            if message[0] == "status":
                self._tell("answer", message[1], self.status())
            else:
                self._call_soon(self._receive, message)

    def _call_soon(self, function: Callable[..., None], *args: Any) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function, *args)

    def _gone(self, peer: str) -> None:
        """A peer closed. Without a driver there is nothing left to do; other peers are the driver's to judge."""
        if peer == DRIVER:
            self.stopped.set()

    def _receive(self, message: tuple[Any, ...]) -> None:
        try:
            self._dispatch(message)
        except Exception as error:  # noqa: BLE001 - reported to the driver as this worker's failure
            self._fail(str(message[1]) if len(message) > 1 else self.spec.id, error)

    def _dispatch(self, message: tuple[Any, ...]) -> None:
        kind, *rest = message
        getattr(self, f"_on_{kind}")(*rest)

    def _on_tick(self, stage: str, tick: Any) -> None:
        self.hosts[stage].inbox.put(tick)

    def _on_item(self, stage: str, producer: tuple[str, int], step: int, item: Any, end: bool) -> None:
        host = self.hosts[stage]
        weight = host.chunk if end else item.shape[1] if isinstance(item, Trajectory) else 1
        host.inbox.put(Entry((producer[0], producer[1]), step, item, end), key=str(step), weight=weight)

    def _on_weights(self, service: str, weights: Weights) -> None:
        if weights.checksums:  # the first publication has them: see docs/decisions.md
            verify(weights)
        self.nodes[service].load(weights)
        self._tell("loaded", service, self.spec.rank, weights.version)

    def _on_call(self, number: int, caller: str, service: str, method: str, args: tuple[Any, ...]) -> None:
        task = self.loop.create_task(self._answer(number, caller, service, method, args))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _answer(self, number: int, caller: str, service: str, method: str, args: tuple[Any, ...]) -> None:
        try:
            given = getattr(self.nodes[service], method)(*args)
            answer = (True, await given if inspect.isawaitable(given) else given)
        except Exception as error:  # noqa: BLE001 - travels to the caller, whose stage fails with it
            answer = (False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        self._post(caller, ("reply", number, *answer))

    def _on_reply(self, number: int, ok: bool, value: Any) -> None:
        future = self.pending.get(number)
        if future is not None and not future.done():
            if ok:
                future.set_result(value)
            else:
                future.set_exception(RuntimeError(f"service call failed: {value}"))

    def _on_granted(self, stage: str) -> None:
        self.turns[stage].set_result(None)

    def _on_state(self, number: int) -> None:
        states = {}
        for name, node in self.nodes.items():
            if isinstance(node, Stateful):
                states[name] = node.state()
            sampler: Any = self.hosts[name].sampler if name in self.hosts else None
            if isinstance(sampler, Stateful):
                states[f"{name}.replay"] = sampler.state()
        self._tell("answer", number, states)

    def _on_restore(self, number: int, states: Mapping[str, Any]) -> None:
        for name, state in states.items():
            node, _, part = name.partition(".")
            target: Any = self.hosts[node].sampler if part == "replay" else self.nodes[node]
            target.restore(state)
        self._tell("answer", number, None)

    def _on_go(self, step: int) -> None:
        """Start every stage's loop, at training step `step`."""
        for host in self.hosts.values():
            host.first_step = step
            task = self.loop.create_task(self._serve(host))
            self.tasks.add(task)

    def _on_stop(self) -> None:
        self.stopped.set()

    async def _serve(self, host: Host) -> None:
        try:
            for output in host.opening():
                await self._emit(host.name, output, host.first_step)
            await host.run()
        except Closed:
            return
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - reported to the driver as this stage's failure
            self._fail(host.name, error)

    # ---- health

    def _fail(self, stage: str, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error))
        self._tell("failed", stage, self.spec.rank, socket.gethostname(), f"{type(error).__name__}: {error}", text)

    def status(self) -> dict[str, Any]:
        """What every stage does now, and where every thread of this process stands."""
        frames = sys._current_frames()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = {
            names.get(ident, str(ident)): "".join(traceback.format_stack(frame)[-6:]) for ident, frame in frames.items()
        }
        return {"doing": {name: host.doing for name, host in self.hosts.items()}, "stacks": stacks}
