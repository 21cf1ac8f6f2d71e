"""Evaluation of a language model: every held-out task exactly once, by a protocol that is stored with its number."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import numpy as np

from m2flow import seeds
from m2flow.protocols import TaskSource
from m2flow.roles.answers import Group, SampleTable, table_rows
from m2flow.roles.conversation import Judge, Talker
from m2flow.roles.evaluation import partition
from m2flow.roles.results import EvalProtocol, succeeded
from m2flow.types import EpisodeResult, Report, Tick


class Examiner:
    """Source stage: a Tick of kind "evaluate" yields one Report with this worker's tasks.

    `talker` is greedy where the protocol is deterministic. An answer succeeds by the reward's component "correct", or
    where there is none by a reward of 1 or more. `together`: conversations held at the same time.
    """

    def __init__(
        self,
        protocol: EvalProtocol,
        talker: Talker,
        source: TaskSource,
        judge: Judge,
        *,
        rank: int = 0,
        size: int = 1,
        together: int = 50,
        table: SampleTable | None = None,
    ) -> None:
        if source.size is not None and source.size < protocol.count:
            raise ValueError(f"evaluation.seeds: {protocol.count} held-out tasks, and there are {source.size}")
        self.protocol, self.talker, self.source, self.judge, self.table = protocol, talker, source, judge, table
        self.rows = partition(range(protocol.count), size, rank)
        self.together = together
        self.seed = seeds.derive(protocol.noise_seed, "examination")

    async def work(self, items: Sequence[Tick]) -> AsyncIterator[Report]:
        """This worker's tasks, as many at a time as `together` says."""
        for tick in items:
            if tick.kind != "evaluate":
                continue
            starts = range(0, len(self.rows), self.together)
            groups = [await self._wave(self.rows[start : start + self.together]) for start in starts]
            if self.table is not None:
                self.table.write(f"eval_{tick.step:06d}", table_rows(groups))
            results = [result for group in groups for result in self._results(group)]
            yield Report(tick.step, payload=results, kind="evaluate")

    async def _wave(self, rows: Sequence[int]) -> Group:
        """One attempt at each of these tasks; the first row is what the group is called by."""
        held = [self.talker.attempt(self.source.task(row), row, seeds.derive(self.seed, row)) for row in rows]
        attempts = await asyncio.gather(*held)
        return Group(attempts, await self.judge.score(attempts), rows[0])

    def _results(self, group: Group) -> list[EpisodeResult]:
        reward = np.asarray(group.scores["reward"], np.float64)
        right = succeeded(group.scores)
        results = []
        for k, attempt in enumerate(group.attempts):
            info = {name: float(values[k]) for name, values in group.scores.items()}
            info |= {"truncated": float(attempt.finish != "stop"), **attempt.info}
            results.append(
                EpisodeResult(
                    seed=self.protocol.seeds[attempt.number],
                    lane=attempt.number,
                    length=len(attempt.at),
                    ret=float(reward[k]),
                    success_once=bool(right[k]),
                    success_at_end=bool(right[k]),
                    info=info,
                )
            )
        return results

    def close(self) -> None:
        """End the reward's workers."""
        self.judge.close()
