"""How a run fails: one message that names stage, replica, host, exception and log; later failures are consequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class RunFailed(RuntimeError):
    """The first failure of a run."""

    def __init__(self, stage: str, rank: int | None, host: str, error: str, text: str, log: str) -> None:
        self.stage, self.rank, self.host, self.error, self.text, self.log = stage, rank, host, error, text, log
        where = stage if rank is None else f"{stage}, replica {rank}"
        body = f"\n{text.rstrip()}" if text else ""
        super().__init__(f"{where} on {host} failed: {error}\nlog: {log}{body}")


class Stalled(RuntimeError):
    """Nobody said anything for too long: who waits for whom, and where every thread stands."""

    def __init__(self, what: str, limit: float, status: Mapping[str, Any]) -> None:
        self.what, self.limit, self.status = what, limit, status
        lines = [f"no progress for {limit:.0f} s while waiting for {what}"]
        for worker, answer in status.items():
            if isinstance(answer, Mapping):
                lines += [f"  {worker}: {stage} {doing}" for stage, doing in answer["doing"].items()]
            else:
                lines.append(f"  {worker}: {answer}")
        for worker, answer in status.items():
            if isinstance(answer, Mapping):
                lines += [f"--- {worker}, thread {name}\n{stack}" for name, stack in answer["stacks"].items()]
        super().__init__("\n".join(lines))
