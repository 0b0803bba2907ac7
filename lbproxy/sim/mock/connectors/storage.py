# SPDX-License-Identifier: Apache-2.0
"""vLLM's ExampleConnector (once SharedStorageConnector) at the simulated server: a folder that prefills and decodes
share, one folder in it a prompt.

The folder of a prompt is made when its prefill begins, and the file `layers` in it when that ends. Who finds the folder
takes the prompt for stored; without the file it reads what is half written. Nothing is ever deleted. A match is the
whole prompt, in whole blocks. Prompts of one token more than whole blocks never match: what is stored is aligned from
all tokens, what is looked up from all but the last one.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import xxhash

from lbproxy.sim.engine.presets import BLOCK_TOKENS
from lbproxy.sim.engine.sequence import KvSource, KvState
from lbproxy.sim.mock.apis.call import GenerationCall, PlannedChoice
from lbproxy.sim.mock.apis.fields import Json
from lbproxy.sim.mock.connectors.legs import Leg, ServerConnector, Unasked
from lbproxy.sim.mock.mock_options import MockOptions
from lbproxy.sim.mock.text import BLOCK_BYTES, token_count

LAYERS = "layers"


class Storage(ServerConnector):
    """The connector of one server. Roles make no difference: every server stores and loads."""

    def __init__(self, options: MockOptions) -> None:
        assert options.shared_storage_path is not None
        self.folder = Path(options.shared_storage_path)
        self.model = options.model
        self.longest = options.hardware().token_budget
        """Tokens of a prompt that is computed in one step. Of a longer one only a part is stored."""

    async def start(self, host: str) -> None:
        """Make the folder. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)

    def leg(self, fields: Json, call: GenerationCall, request_id: str) -> Leg:
        """Every call stores its prompts, or loads them."""
        return StorageLeg(self, call)


class _StoredKv(Unasked):
    """A prompt in the folder, which stays there."""

    def __init__(self, layers: Path) -> None:
        self._layers = layers

    @property
    def state(self) -> KvState:
        """What is half written is read all the same."""
        return KvState.HELD if self._layers.exists() else KvState.EXPIRED


class StorageLeg(Leg):
    """One call."""

    def __init__(self, storage: Storage, call: GenerationCall) -> None:
        super().__init__(call)
        self._storage = storage
        self._adapter = None if call.model == storage.model else call.model
        self._saved: dict[int, int] = {}
        """Tokens that are loaded, by choice."""
        self._cached = 0

    def source(self, index: int) -> KvSource | None:
        """The prompt, if its folder is there; else it is stored."""
        prompt, storage = self.call.prompts[index // self.call.n], self._storage
        name, tokens = looked_up_as(prompt, storage.model, self._adapter)
        if tokens and (storage.folder / name).is_dir():
            self._saved[index] = tokens
            return _StoredKv(storage.folder / name / LAYERS)
        if aligned(token_count(len(prompt))):
            with contextlib.suppress(OSError):
                (storage.folder / stored_as(prompt, storage.model, self._adapter)).mkdir(exist_ok=True)
        return None

    def first(self, index: int, choice: PlannedChoice, cached_tokens: int) -> None:
        """What was computed is stored."""
        storage, prompt = self._storage, self.call.prompts[index // self.call.n]
        if index % self.call.n == 0:
            self._cached += max(cached_tokens, self._saved.get(index, 0))
        if index not in self._saved and aligned(choice.prompt_tokens) and choice.prompt_tokens <= storage.longest:
            with contextlib.suppress(OSError):
                (storage.folder / stored_as(prompt, storage.model, self._adapter) / LAYERS).touch()

    def cached_tokens(self, own: int, received: int) -> int:
        """Those found here, and those loaded."""
        return self._cached


def aligned(tokens: int) -> int:
    """vLLM's `align_to_block_size`: whole blocks before the last token."""
    return max(0, (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS)


def stored_as(prompt: bytes, model: str, adapter: str | None) -> str:
    """The folder in which a prompt is kept."""
    return _name(prompt, aligned(token_count(len(prompt))), model, adapter)


def looked_up_as(prompt: bytes, model: str, adapter: str | None) -> tuple[str, int]:
    """The folder in which a prompt is looked for, and how many tokens it would save; 0 = it is not looked for."""
    tokens = aligned(token_count(len(prompt)) - 1)
    return _name(prompt, tokens, model, adapter), tokens


def _name(prompt: bytes, tokens: int, model: str, adapter: str | None) -> str:
    # The length is not part of vLLM's hash either: the tokens are.
    digest = xxhash.xxh3_128(prompt[: tokens // BLOCK_TOKENS * BLOCK_BYTES])
    digest.update(f"\0{model}\0{adapter or ''}".encode())
    return digest.hexdigest()
