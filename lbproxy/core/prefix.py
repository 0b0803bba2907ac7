"""What is in each endpoint's prefix cache, as far as a proxy can know it: which blocks it sent where, and when.

Three parts, in the order in which a request passes them:

- `flatten`: a parsed OpenAI body -> the bytes that the model would read. The next turn of a conversation flattens to
  the bytes of the turn before and more, so that a shared beginning stays one.
- `hash_prompt`: those bytes -> one key for each full block, chained, so that a key stands for everything up to it.
- `PrefixIndex`: key -> the endpoints that have it, as a bit mask, so that one pass over a prompt's keys finds how far
  each endpoint's cache reaches, however many there are. `EndpointCache` is one endpoint's share of the index.

Invariants: a key has an endpoint's bit exactly while it is in that endpoint's cache, either pinned (a request in flight
uses it; never evicted) or idle (oldest evicted first); bits of endpoints that left are cleared, and reused. The caches
together never hold more than `PrefixIndex.max_entries`.

Keys are not secret and can be forged; all that comes of a forged one is a wrong guess.
"""

from __future__ import annotations

import heapq
import json
import math
from array import array
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias, cast

import orjson
import xxhash

BLOCK_BYTES = 1024
"""About 256 tokens of English. Smaller blocks find no more (64 tokens were tried) and cost four times as much."""
MAX_PROMPT_BYTES = 8 << 20
"""How much of a prompt is flattened and hashed: about 2 million tokens, more than engines take."""
MAX_PIECES = 50_000
"""How many messages, parts and strings of a prompt are looked at: bounds the time (about 1 µs each)."""
FEW_MESSAGES = 1000
"""So many are not bounded one by one."""
ENTRY_BYTES = 360
"""Memory of a block in one cache, at most: 150 while blocks only come, and where they come and go, up to 360, by how
far the hash tables have grown (`python -m benchmarks.decision`)."""
MAX_ENTRIES = 600 * 1024**2 // ENTRY_BYTES
"""Blocks in all caches together, if the settings do not say: 1,700 on each of 1,000 endpoints."""

STALE_KEYS = 1000
"""Of blocks that were used again: so many may stay behind in a cache's runs, and as many as are idle."""
BlockKey: TypeAlias = object
"""A number of 64 bits that nobody calculates with. As an int compiled code would take each apart and put it together
again, and keep it in every table anew."""

_hash = xxhash.xxh3_64_intdigest


# From a body to bytes


def flatten(body: Mapping[str, object]) -> bytes:
    """The prompt in a chat or completions body as bytes; b"" if there is none.

    Chat: tools, then each message's role, contents and tool calls, in order; what is not text stands as its hash.
    Completions: the text, the texts one after the other, or 4 bytes for each token id. Never raises, whatever the
    types; linear in the body's size and bounded by `MAX_PROMPT_BYTES` and `MAX_PIECES`.
    """
    messages = body.get("messages")
    if type(messages) is list and len(messages) <= FEW_MESSAGES and "tools" not in body and "system" not in body:
        texts = _texts_of(messages)
        if texts is not None:
            return "".join(texts).encode("utf-8", "surrogatepass")[:MAX_PROMPT_BYTES]
    pieces = _Pieces()
    if isinstance(messages, list):
        for key in ("tools", "system"):
            if body.get(key):
                pieces.add(b"\x1d" + key.encode() + b"\n")
                _flatten_content(body[key], pieces)
        for message in messages:
            if pieces.full:
                break
            _flatten_message(message, pieces)
    else:
        _flatten_prompt(body.get("prompt"), pieces)
    return b"".join(pieces.parts)[:MAX_PROMPT_BYTES]


def _texts_of(messages: list[object]) -> list[str] | None:
    """The same of messages that are each a role and a text, as nearly all are; None of others. Half the time."""
    texts: list[str] = []
    for message in messages:
        if type(message) is not dict or "tool_calls" in message or "tool_call_id" in message:
            return None
        role, content = message.get("role"), message.get("content")
        if type(role) is not str or type(content) is not str:
            return None
        texts += ("\x1e", role, "\n", content)
    return texts


class _Pieces:
    """What was flattened so far, within bounds."""

    __slots__ = ("parts", "room")

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.room = MAX_PROMPT_BYTES

    def add(self, data: bytes) -> None:
        self.parts.append(data)
        self.room -= len(data)

    @property
    def full(self) -> bool:
        return self.room <= 0 or len(self.parts) >= MAX_PIECES


def _flatten_message(message: object, pieces: _Pieces) -> None:
    if not isinstance(message, dict):
        pieces.add(b"\x1e")
        _flatten_content(message, pieces)
        return
    role = message.get("role")
    pieces.add(b"\x1e" + (_encode(role) if isinstance(role, str) else b"") + b"\n")
    _flatten_content(message.get("content"), pieces)
    for key in ("tool_calls", "tool_call_id"):
        if message.get(key):
            pieces.add(b"\x1f")
            pieces.add(_dump(message[key]))


def _flatten_content(content: object, pieces: _Pieces) -> None:
    """A text, or a list of parts: those of text as they are, others as a hash."""
    if isinstance(content, str):
        pieces.add(_encode(content))
    elif isinstance(content, list):
        for part in content:
            if pieces.full:
                break
            text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
            if isinstance(text, str):
                pieces.add(_encode(text))
            elif isinstance(part, dict) and part.get("type") == "function":
                pieces.add(_dump(part))  # a tool: the model reads it as JSON
            else:
                pieces.add(b"\x1f%016x" % _hash(_dump(part)))
    elif content is not None:
        pieces.add(b"\x1f%016x" % _hash(_dump(content)))


def _flatten_prompt(prompt: object, pieces: _Pieces) -> None:
    """`prompt` of a completions body: text, texts, token ids, or lists of token ids."""
    if isinstance(prompt, str):
        pieces.add(_encode(prompt))
    elif isinstance(prompt, list):
        ids = _token_bytes(prompt)
        if ids is not None:
            pieces.add(ids)
            return
        for one in prompt:
            if pieces.full:
                break
            if isinstance(one, str):
                pieces.add(_encode(one))
            elif isinstance(one, list):
                pieces.add(_token_bytes(one) or b"")
            pieces.add(b"\x1e")


def _token_bytes(ids: list[object]) -> bytes | None:
    """Four bytes for each token id; None if these are no token ids."""
    try:
        return array("I", cast("list[int]", ids[: MAX_PROMPT_BYTES // 4])).tobytes()
    except (TypeError, OverflowError):
        return None


def _encode(text: str) -> bytes:
    return text[:MAX_PROMPT_BYTES].encode("utf-8", "surrogatepass")


def _dump(value: object) -> bytes:
    """JSON of a value that came from JSON, even of one that orjson cannot write; b"?" if nobody can."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        try:
            return json.dumps(value).encode()
        except (ValueError, TypeError, RecursionError):
            return b"?"


# From bytes to keys


def hash_prompt(
    prompt: bytes,
    *,
    model: str | None,
    adapter: str | None = None,
    salt: str | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> list[int]:
    """One 64-bit key for each full block of `prompt`, in order; a partial last block has none.

    Key n is the xxh3 hash of block n with key n-1 as the seed, and the first seed is that of model, adapter and cache
    salt: equal keys mean equal prompts so far, in the same cache. One pass, about 0.2 µs a block.
    """
    size = min(len(prompt), MAX_PROMPT_BYTES)
    if size < block_bytes:
        return []
    key: BlockKey = _cached_seed(model, adapter) if salt is None else _seed(model, adapter, salt)
    hash_block = cast("Callable[[bytes, BlockKey], BlockKey]", _hash)
    keys: list[BlockKey] = []
    for start in range(0, size - block_bytes + 1, block_bytes):
        key = hash_block(prompt[start : start + block_bytes], key)
        keys.append(key)
    return cast("list[int]", keys)


def _seed(model: str | None, adapter: str | None, salt: str | None = None) -> int:
    names = "\0".join(f"{len(name)}:{name}" if name is not None else "-" for name in (model, adapter, salt))
    return _hash(names.encode("utf-8", "surrogatepass"))


_cached_seed = lru_cache(maxsize=1024)(_seed)
"""Names of models are short (`core.openai`); a salt may be as long as a body."""


# From keys to endpoints


class PrefixIndex:
    """Which endpoint has which blocks. Endpoints take part by `join` and are called by their slot, a small number."""

    def __init__(self, block_bytes: int = BLOCK_BYTES, max_entries: int = MAX_ENTRIES) -> None:
        self.block_bytes = block_bytes
        self.max_entries = max_entries
        self.entries = 0
        """Blocks in all caches together."""
        self.width = 0
        """Above every slot in use."""
        self.members = 0
        self.masks: dict[BlockKey, int] = {}
        """Key -> the bits of the endpoints that have it; never 0. `EndpointCache` writes here."""
        self._free: list[int] = []

    def join(self) -> EndpointCache:
        """An empty cache in a free slot."""
        if self._free:
            slot = heapq.heappop(self._free)  # the lowest, so that masks stay short
        else:
            slot = self.width
            self.width += 1
        self.members += 1
        return EndpointCache(self, slot)

    def leave(self, cache: EndpointCache) -> None:
        """Forget a cache; its slot is free for another. Later calls of its methods are no-ops."""
        cache.detach()
        self.members -= 1
        heapq.heappush(self._free, cache.slot)

    def renew(self, cache: EndpointCache) -> EndpointCache:
        """An empty cache in the place of one whose endpoint lost everything."""
        cache.detach()
        return EndpointCache(self, cache.slot)

    @property
    def fair_share(self) -> int:
        """Blocks that one cache may hold when every other holds as many."""
        return self.max_entries // max(1, self.members)

    def match(self, keys: Sequence[BlockKey]) -> list[int]:
        """By slot: how many of the first keys are there without a gap. One look-up a key, up to the longest match."""
        depths = [0] * self.width
        alive = self.masks.get(keys[0], 0) if keys else 0
        if not alive:
            return depths
        look_up = self.masks.get
        depth = 0
        for key in keys:
            holders = alive & look_up(key, 0)
            if holders != alive:
                _assign(depths, alive ^ holders, depth)
                if not holders:
                    return depths
                alive = holders
            depth += 1
        _assign(depths, alive, depth)
        return depths

    def longest(self, keys: Sequence[BlockKey]) -> int:
        """The deepest match of any endpoint."""
        alive = -1
        look_up = self.masks.get
        for depth, key in enumerate(keys):
            alive &= look_up(key, 0)
            if not alive:
                return depth
        return len(keys)


def _assign(depths: list[int], mask: int, depth: int) -> None:
    """Write `depth` at every set bit of `mask`."""
    while mask:
        lowest = mask & -mask
        depths[lowest.bit_length() - 1] = depth
        mask ^= lowest


class EndpointCache:
    """The blocks that one endpoint is believed to have.

    Those that nobody uses are evicted in the order in which they became idle. They did so request by request: `_runs`
    has a list for each, its first to go last, and `_idle` says in which run a block is now. A block that was used again
    since stays behind in its old run, where it is passed over.
    """

    __slots__ = ("_bit", "_idle", "_index", "_listed", "_pins", "_runs", "attached", "pinned", "size", "slot")

    def __init__(self, index: PrefixIndex, slot: int) -> None:
        self._index = index
        self._bit = 1 << slot
        self._pins: dict[BlockKey, int] = {}
        self._idle: dict[BlockKey, list[BlockKey]] = {}
        self._runs: deque[list[BlockKey]] = deque()
        self._listed = 0
        """Keys in all runs."""
        self.slot = slot
        self.attached = True
        self.size = 0
        """Blocks, pinned and idle."""
        self.pinned = 0
        """Blocks that requests in flight use."""

    @property
    def pins(self) -> Container[BlockKey]:
        """Their keys."""
        return self._pins

    def pin(self, keys: Sequence[BlockKey]) -> tuple[int, int]:
        """A request with these keys starts: they are there now, and stay until `unpin`.

        Returns how many of the first keys were there before, and how many are pinned: all, unless the index is full.
        """
        if not self.attached:
            return 0, 0
        pins, idle = self._pins, self._idle
        matched = 0
        for key in keys:
            count = pins.get(key)
            if count is not None:
                pins[key] = count + 1
            elif key in idle:
                del idle[key]
                pins[key] = 1
            else:
                break
            matched += 1
        held = matched + (self._add(keys[matched:]) if matched < len(keys) else 0)
        self.pinned = len(pins)
        return matched, held

    def _add(self, keys: Sequence[BlockKey]) -> int:
        """Pin these, of which the first is not there. Returns how many of the first are pinned."""
        pins, idle, index, bit = self._pins, self._idle, self._index, self._bit
        masks, count = index.masks, len(keys)
        if masks.keys().isdisjoint(keys):  # nobody has any, as nearly always: all in one go takes a third of the time
            if index.entries + count > index.max_entries:
                self._evict(index.entries + count - index.max_entries)
            new = dict.fromkeys(keys, 1)
            if index.entries + count <= index.max_entries and len(new) == count:
                pins.update(new)
                masks.update(dict.fromkeys(keys, bit))
                self.size += count
                index.entries += count
                return count
        held = 0
        for key in keys:
            users = pins.get(key)
            if users is not None:
                pins[key] = users + 1
            elif key in idle:
                del idle[key]
                pins[key] = 1
            else:
                if index.entries >= index.max_entries and not self._evict(1):
                    break
                masks[key] = masks.get(key, 0) | bit
                pins[key] = 1
                self.size += 1
                index.entries += 1
            held += 1
        return held

    def unpin(self, keys: Sequence[BlockKey], held: int) -> int:
        """The request is over. The last block becomes idle first, so that beginnings, which others share, live longest.

        `held`: what `pin` said. Returns how many blocks nobody uses any more.
        """
        if not self.attached:
            return 0
        pins, idle = self._pins, self._idle
        run: list[BlockKey] = []
        for key in keys if held == len(keys) else keys[:held]:
            count = pins[key]
            if count > 1:
                pins[key] = count - 1
            else:
                del pins[key]
                idle[key] = run
                run.append(key)
        self.pinned = len(pins)
        freed = len(run)
        if freed:
            self._runs.append(run)
            self._listed += freed
            if self._listed > 2 * len(idle) + STALE_KEYS:
                self._tidy()
        return freed

    def _tidy(self) -> None:
        """Drop what stayed behind in the runs. As often as half of them is that: a constant for each block."""
        idle = self._idle
        runs = [[key for key in run if idle.get(key) is run] for run in self._runs]
        self._runs = deque(run for run in runs if run)
        for run in self._runs:
            for key in run:
                idle[key] = run
        self._listed = len(idle)

    def trim(self, blocks: float) -> None:
        """Evict idle blocks, oldest first, until no more than `blocks` are left or none is idle."""
        self._evict(math.ceil(self.size - blocks))

    def _evict(self, blocks: int) -> int:
        """As many idle blocks, oldest first, as there are. Returns how many."""
        runs, idle, masks, bit = self._runs, self._idle, self._index.masks, self._bit
        gone = 0
        while runs and gone < blocks:
            run = runs[0]
            while run and gone < blocks:
                key = run.pop()
                self._listed -= 1
                if idle.get(key) is run:
                    del idle[key]
                    left = masks[key] ^ bit
                    if left:
                        masks[key] = left
                    else:
                        del masks[key]
                    gone += 1
            if not run:
                runs.popleft()
        self.size -= gone
        self._index.entries -= gone
        return gone

    def _forget(self, key: BlockKey) -> None:
        masks = self._index.masks
        left = masks[key] ^ self._bit
        if left:
            masks[key] = left
        else:
            del masks[key]

    def detach(self) -> None:
        """Take everything out of the index, for good."""
        if self.attached:
            for key in (*self._pins, *self._idle):
                self._forget(key)
            self._index.entries -= self.size
            self.size = self.pinned = 0
            self.attached = False
            self._pins.clear()
            self._idle.clear()
            self._runs.clear()
            self._listed = 0
