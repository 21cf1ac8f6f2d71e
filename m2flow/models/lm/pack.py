"""How rows of tokens are laid side by side without padding, and which tokens of them see which.

A row is a conversation. Rows with the same prompt (the tokens before the first sampled one) compute it once: the packed
order of such a group is its prompt, then the rest of each row. Tokens that predict nothing that was sampled, those from
the last sampled one on, are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
AREA = 2**23  # query times key positions of one padded block of attention, at most (one row may exceed it)
SHARED_LENGTH = 8192  # rows longer than this do not share: their own part would need a mask of length^2


@dataclass(frozen=True, slots=True)
class Block:
    """Segments whose attention is computed together, padded to the longest: r rows of Lq queries and Lk keys."""

    query: Tensor  # int64 [r, Lq], packed positions; behind the end of a row any position
    key: Tensor  # int64 [r, Lk]
    mask: Tensor | None  # bool [r, 1, Lq, Lk], which keys a query sees; None: causal, Lq == Lk


@dataclass(frozen=True, slots=True)
class Pack:
    """N packed tokens, the blocks of attention that cover them, and where sampled tokens are read."""

    ids: Tensor  # int64 [N]
    position: Tensor  # int64 [N], within its row
    blocks: tuple[Block, ...]
    back: Tensor  # int64 [N], where a packed token's query is within all blocks' queries put one after another
    read: Tensor  # int64 [K], the packed position that predicts each sampled token
    cell: Tensor  # int64 [K], which of the [S * C] cells of `at` it is
    action: Tensor  # int64 [K], the sampled token
    longest: int  # tokens of the longest row


@dataclass(slots=True)
class _Segment:
    """`length` tokens at packed position `start`, behind a prompt of `prompt` tokens at `prompt_start`."""

    start: int
    length: int
    prompt_start: int = 0
    prompt: int = 0


def pack(tokens: Tensor, at: Tensor, *, share: bool) -> Pack | None:
    """The layout of rows `tokens` int64 [S, W] whose sampled tokens stand at `at` int64 [S, C] (0: none).

    None where no row has a sampled token. What stands in `tokens` behind the
    last sampled token is not read.
    """
    ids, where = tokens.detach().cpu().numpy(), at.detach().cpu().numpy()
    ends, device = where.max(1), tokens.device
    rows = np.flatnonzero(ends)
    if not len(rows):
        return None
    groups = _groups(ids, where, ends, rows) if share else [[int(row)] for row in rows]
    start_of, shared, suffix = (np.zeros(len(ids), np.int64) for _ in range(3))
    pieces, positions, alone, behind = [], [], [], []
    total = 0

    def add(row: int, first: int, last: int) -> int:
        nonlocal total
        pieces.append(ids[row, first:last])
        positions.append(np.arange(first, last))
        total += last - first
        return total - (last - first)

    for group in groups:
        prompt = int(where[group[0], 0]) if len(group) > 1 else int(ends[group[0]])
        start = add(group[0], 0, prompt)
        alone.append(_Segment(start, prompt))
        for row in group:
            start_of[row], shared[row] = start, prompt
            length = int(ends[row]) - prompt
            if length:
                suffix[row] = add(row, prompt, prompt + length)
                behind.append(_Segment(int(suffix[row]), length, start, prompt))
    blocks = [_causal(part) for part in _batches(alone)] + [_masked(part) for part in _batches(behind)]
    cells = np.flatnonzero(where)
    row, seen = cells // where.shape[1], where.reshape(-1)[cells] - 1
    read = np.where(seen < shared[row], start_of[row] + seen, suffix[row] + seen - shared[row])
    back = np.empty(total, np.int64)
    offset = 0
    for query, _, _, lengths in blocks:
        valid = np.arange(query.shape[1]) < lengths[:, None]
        back[query[valid]] = offset + np.flatnonzero(valid)
        offset += query.size

    def tensor(x: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(device)

    return Pack(
        ids=tensor(np.concatenate(pieces)),
        position=tensor(np.concatenate(positions)),
        blocks=tuple(
            Block(tensor(query), tensor(key), None if mask is None else torch.from_numpy(mask)[:, None].to(device))
            for query, key, mask, _ in blocks
        ),
        back=tensor(back),
        read=tensor(read),
        cell=tensor(cells),
        action=tensor(ids[row, seen + 1]),
        longest=int(ends.max()),
    )


def _groups(ids: Ints, where: Ints, ends: Ints, rows: Ints) -> list[list[int]]:
    """Rows with the same prompt, in the order of their first row."""
    found: dict[object, list[int]] = {}
    for row in rows.tolist():
        alone = ends[row] > SHARED_LENGTH
        key = row if alone else ids[row, : where[row, 0]].tobytes()
        found.setdefault(key, []).append(row)
    return list(found.values())


def _batches(segments: Sequence[_Segment]) -> list[list[_Segment]]:
    """Segments of similar length together, the longest first, so that little is padded."""
    out: list[list[_Segment]] = []
    area = longest = 0
    for one in sorted(segments, key=lambda s: (-(s.prompt + s.length), s.start)):
        keys = one.prompt + one.length
        size = max(area, one.length * keys)
        if out and 2 * keys >= longest and size * (len(out[-1]) + 1) <= AREA:
            out[-1].append(one)
            area = max(area, one.length * longest)
        else:
            out.append([one])
            longest, area = keys, one.length * keys
    return out


_Arrays = tuple[Ints, Ints, NDArray[np.bool_] | None, Ints]


def _causal(segments: Sequence[_Segment]) -> _Arrays:
    """Query and key positions of segments that stand for themselves, no mask, and their lengths."""
    starts, lengths = np.array([s.start for s in segments]), np.array([s.length for s in segments])
    at = np.arange(int(lengths.max()))
    index = np.where(at < lengths[:, None], starts[:, None] + at, starts[:, None])
    return index, index, None, lengths


def _masked(segments: Sequence[_Segment]) -> _Arrays:
    """The same behind a prompt: keys are the prompt's, padded, and the segment's own."""
    starts, lengths = np.array([s.start for s in segments]), np.array([s.length for s in segments])
    first, prompts = np.array([s.prompt_start for s in segments]), np.array([s.prompt for s in segments])
    query, before = np.arange(int(lengths.max())), np.arange(int(prompts.max()))
    own = np.where(query < lengths[:, None], starts[:, None] + query, starts[:, None])
    shared = np.where(before < prompts[:, None], first[:, None] + before, first[:, None])
    seen = np.broadcast_to((before < prompts[:, None])[:, None, :], (len(starts), len(query), len(before)))
    causal = np.broadcast_to(query[None, :] <= query[:, None], (len(starts), len(query), len(query)))
    return own, np.concatenate([shared, own], 1), np.concatenate([seen, causal], 2), lengths
