"""Snapshots of the block pool for ``/pages``, and the feed of them to browsers."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..engine.async_llm import AsyncLLM
    from ..engine.core import Engine

FRAMES_PER_SECOND = 5
CACHED, MOST_HOLDERS = 255, 250
TEXT_CHARS = 600


@dataclass(frozen=True)
class PoolCounts:
    """Number of blocks in each state; free + cached + held is the total."""

    free: int
    """Held by no sequence, and not in the prefix index."""
    cached: int
    """Held by no sequence, but in the prefix index."""
    held: int
    """Held by sequences."""
    shared: int
    """Held by more than one sequence."""


def count_blocks(engine: Engine) -> PoolCounts:
    """Return the pool's current counts. Call it on the engine's thread."""
    pool, index = engine.pool, engine.scheduler.index
    cached = sum(pool.ref_count(block) == 0 for block in index) if index is not None else 0
    held = pool.num_blocks - pool.num_free
    shared = sum(count > 1 for count in _count_holders(engine).values())
    return PoolCounts(pool.num_free - cached, cached, held, shared)


def _count_holders(engine: Engine) -> Counter[int]:
    """Return how many sequences hold each block, those that ended in a step in flight included."""
    holders = (*engine.scheduler.running, *engine.scheduler.ended)
    return Counter(block for sequence in holders for block in sequence.table.blocks)


def snapshot(engine: Engine, written: dict[Any, int], *, show_text: bool) -> dict[str, Any]:
    """Return every block's state and every running sequence's table, ready for JSON.

    Call it on the engine's thread.

    Args:
        engine: The engine.
        written: Tokens of each sequence at the last snapshot, updated here. Blocks that were
            written to since then are marked.
        show_text: Whether to include prompts and outputs.

    Returns:
        ``cells``, base64 of one byte a block: 0 free, 255 cached, else its number of holders (at
        most 250); ``written``, blocks written since the last snapshot; ``sequences``; ``counts``.
    """
    pool, scheduler = engine.pool, engine.scheduler
    size = engine.cache.block_size
    cells = bytearray(pool.num_blocks)
    for block in scheduler.index or ():
        cells[block] = CACHED
    for block, count in _count_holders(engine).items():
        cells[block] = min(count, MOST_HOLDERS)
    sequences: list[dict[str, Any]] = []
    changed: set[int] = set()
    seen: set[Any] = set()
    for sequence in scheduler.running:
        key = (sequence.request.request_id, sequence.index)
        seen.add(key)
        before, now = written.get(key, 0), sequence.num_computed
        if key not in written:
            before = min(sequence.request.num_cached_tokens or 0, now)
        blocks = sequence.table.blocks
        changed.update(blocks[min(before, now) // size : -(-now // size)] if now > before else ())
        written[key] = now
        sequences.append(_describe(engine, sequence, key, show_text))
    for key in written.keys() - seen:
        del written[key]
    counts = engine.counts
    return {
        "time": time.time(),
        "num_blocks": pool.num_blocks,
        "block_size": size,
        "num_free": pool.num_free,
        "cells": base64.b64encode(cells).decode(),
        "written": sorted(changed),
        "sequences": sequences,
        "waiting": len(scheduler.waiting),
        "counts": {
            "prompt_tokens": counts.prompt_tokens,
            "cached_tokens": counts.cached_tokens,
            "copied_blocks": counts.copied_blocks,
            "preemptions": counts.preemptions,
        },
    }


def _describe(
    engine: Engine, sequence: Any, key: tuple[Any, int], show_text: bool
) -> dict[str, Any]:
    request = sequence.request
    described = {
        "id": f"{key[0]}.{key[1]}",
        "request": key[0],
        "sample": key[1],
        "tokens": sequence.num_computed,
        "prompt_tokens": len(request.prompt_token_ids),
        "cached_tokens": request.num_cached_tokens or 0,
        "blocks": list(sequence.table.blocks),
    }
    if show_text and engine.tokenizer is not None:
        text = engine.tokenizer.decode(sequence.token_ids[-TEXT_CHARS // 2 :])
        described["text"] = text[-TEXT_CHARS:]
    return described


class PageFeed:
    """Takes snapshots while clients are connected, and sends each to all of them."""

    def __init__(self, llm: AsyncLLM, *, show_text: bool = False) -> None:
        self._llm, self._show_text = llm, show_text
        self._written: dict[Any, int] = {}
        self._num_tokens = 0
        self._watchers: set[asyncio.Queue[bytes | None]] = set()
        self._task: asyncio.Task[None] | None = None
        llm.thread.observers.append(self._note_step)

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield snapshots in JSON, at most five a second; a slow reader misses some."""
        frames: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=2)
        self._watchers.add(frames)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch())
        try:
            while (frame := await frames.get()) is not None:
                yield frame
        finally:
            self._watchers.discard(frames)

    async def _watch(self) -> None:
        last = due = time.monotonic()
        self._num_tokens = 0
        try:
            while self._watchers and self._llm.is_alive:
                frame = await self._llm.run_in_engine(self._take)
                now = time.monotonic()
                num_tokens, self._num_tokens = self._num_tokens, 0
                frame["tokens_per_second"] = num_tokens / max(now - last, 1e-3)
                last = now
                # Encoded once for all clients: the tables of 20 000 held blocks take 5 ms.
                encoded = json.dumps(frame, separators=(",", ":")).encode()
                for frames in self._watchers:
                    if not frames.full():
                        frames.put_nowait(encoded)
                # Count from when this one was due, so that its own duration does not add up.
                due = max(due + 1 / FRAMES_PER_SECOND, time.monotonic())
                await asyncio.sleep(due - time.monotonic())
        finally:
            for frames in self._watchers:
                while frames.full():
                    frames.get_nowait()
                frames.put_nowait(None)

    def _take(self) -> dict[str, Any]:
        return snapshot(self._llm.engine, self._written, show_text=self._show_text)

    def _note_step(self, report: Any) -> None:
        self._num_tokens += report.num_tokens
