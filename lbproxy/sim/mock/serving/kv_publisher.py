# SPDX-License-Identifier: Apache-2.0
"""Publishes the KV events of one simulated engine over ZMQ, as vLLM does (distributed/kv_events.py of 0.33).

One batch at the end of each step that changed the cache; a clear of the cache, too, is published with the next step.
The last `BUFFERED` batches can be replayed. As in vLLM an address with a concrete host is connected to, one with `*` is
bound, and each rank has the port above the first by its number; the replay address is always bound.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

import zmq
from msgspec.msgpack import encode

from lbproxy.core.engines.kv_events import END_OF_REPLAY, SEQUENCE_BYTES
from lbproxy.sim.engine.presets import BLOCK_TOKENS

BUFFERED: Final = 10_000
"""vLLM's `buffer_steps`."""
_END: Final = [b"", b"", END_OF_REPLAY.to_bytes(SEQUENCE_BYTES), b""]


class KvPublisher:
    """Those of one rank: a `BlockReport` of its engine. Made and closed inside the running loop."""

    def __init__(self, endpoint: str, replay_endpoint: str | None, rank: int, topic: bytes = b"") -> None:
        """Raises OSError if an address cannot be had."""
        self.topic = topic
        self.lose = 0
        """So many of the next batches are not sent, but can be replayed."""
        self._rank = rank
        self._sequence = 0
        self._changes: list[dict[str, object]] = []
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=BUFFERED)
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._replays: zmq.Socket[bytes] | None = None
        try:
            url = _with_rank(endpoint, rank)
            if "*" in url or "[::]" in url:
                self._publisher.bind(url)
            else:
                self._publisher.connect(url)
            if replay_endpoint is not None:
                self._replays = self._context.socket(zmq.ROUTER)
                self._replays.bind(_with_rank(replay_endpoint, rank))
                asyncio.get_running_loop().add_reader(int(self._replays.get(zmq.FD)), self._replay)
        except zmq.ZMQError as error:
            self.close()
            raise OSError(f"KV events: {error}") from None

    # What the engine reports

    def stored(self, hashes: Sequence[int]) -> None:
        event: dict[str, object] = {
            "type": "BlockStored",
            "block_hashes": list(hashes),
            "parent_block_hash": None,
            "token_ids": [0] * (BLOCK_TOKENS * len(hashes)),
            "block_size": BLOCK_TOKENS,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        self._changes.append(event)

    def removed(self, content: int) -> None:
        self._changes.append({"type": "BlockRemoved", "block_hashes": [content], "medium": "GPU", "group_idx": 0})

    def cleared(self) -> None:
        self._changes.append({"type": "AllBlocksCleared"})

    # Publishing

    def publish(self) -> None:
        """A step has ended: send what changed in it."""
        if not self._changes:
            return
        payload = encode([time.time(), self._changes, self._rank])
        self._changes = []
        number, self._sequence = self._sequence, self._sequence + 1
        self._sent.append((number, payload))
        if self.lose:
            self.lose -= 1
        else:
            self._publisher.send_multipart([self.topic, number.to_bytes(SEQUENCE_BYTES), payload])

    def start_again(self) -> None:
        """As another process at the same address would: from 0, and without a past."""
        self._sequence = 0
        self._sent.clear()

    def _replay(self) -> None:
        """Respond to what was asked for: everything since then, and an end."""
        replays = self._replays
        while replays is not None and int(replays.get(zmq.EVENTS)) & zmq.POLLIN:
            client, *asked = replays.recv_multipart(zmq.NOBLOCK)
            if len(asked) != 2 or len(asked[1]) != SEQUENCE_BYTES:
                continue
            start = int.from_bytes(asked[1])
            for number, payload in self._sent:
                if number >= start:
                    replays.send_multipart([client, b"", self.topic, number.to_bytes(SEQUENCE_BYTES), payload])
            replays.send_multipart([client, *_END])

    def close(self) -> None:
        """Let go of both addresses. May be called twice."""
        replays, self._replays = self._replays, None
        if replays is not None and not replays.closed:
            asyncio.get_running_loop().remove_reader(int(replays.get(zmq.FD)))
        self._context.destroy(linger=0)


def _with_rank(endpoint: str, rank: int) -> str:
    """Raises OSError if there is no port."""
    base, _, port = endpoint.rpartition(":")
    if not port.isdecimal() or not base.startswith("tcp://"):
        raise OSError(f"KV events: expected tcp://host:port, got {endpoint!r}")
    return f"{base}:{int(port) + rank}"
