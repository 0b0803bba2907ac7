# SPDX-License-Identifier: Apache-2.0
"""Requests as programs send them: OpenAI's SDK, retries switched off, so that every failure is seen.

An answer counts as good only if it is whole: as many tokens as were asked for and the finish reason of that. vLLM ends
the streams that it aborts in a way that no SDK objects to (finish_reason `abort`, `[DONE]`).
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Self

import httpx
import openai
from openai import OpenAI
from openai.types import Completion

from tests.real.servers import MODEL, LlmServer, sum_of

ERRORS = (openai.OpenAIError, httpx.HTTPError)  # what the SDK raises; in mid-stream httpx's own as well


@dataclass(frozen=True)
class Result:
    """How one request ended."""

    began: float
    """Monotonic seconds."""
    seconds: float
    endpoint: str = ""
    """Who answered, by lbproxy's header. Empty if it failed, or lbproxy was not asked."""
    attempts: int = 1
    error: str = ""


class Client:
    """One SDK client for many threads. Every prompt is another, so that no cached prefix draws it to a server."""

    def __init__(self, url: str, *, model: str = MODEL, padding: str = "") -> None:
        """`padding`: the end of every prompt."""
        self._sdk = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        self._model, self._padding = model, padding
        self._numbers = count(secrets.randbelow(10**9))
        self._lock = threading.Lock()
        self.streaming = 0
        """Streams that have begun and not ended."""

    def close(self) -> None:
        self._sdk.close()

    def ask(self, max_tokens: int, *, stream: bool) -> Result:
        """One completion, to its end."""
        began = time.monotonic()
        try:
            answer = self._sdk.completions.with_raw_response.create(
                model=self._model,
                prompt=f"{next(self._numbers)} is a number{self._padding}",
                max_tokens=max_tokens,
                stream=stream,
                extra_body={"ignore_eos": True, **({"stream_options": {"include_usage": True}} if stream else {})},
            )
            parsed = answer.parse()
            chunks = [parsed] if isinstance(parsed, Completion) else list(self._streamed(parsed))
        except ERRORS as e:
            return Result(began, time.monotonic() - began, error=f"{type(e).__name__}: {e}"[:300])
        finish = {choice.finish_reason for chunk in chunks for choice in chunk.choices} - {None}
        usage = chunks[-1].usage if chunks else None
        tokens = usage.completion_tokens if usage else None
        return Result(
            began,
            time.monotonic() - began,
            answer.headers.get("x-lbproxy-endpoint", ""),
            int(answer.headers.get("x-lbproxy-attempts", "1")),
            "" if (finish, tokens) == ({"length"}, max_tokens) else f"not whole: {tokens} tokens, {finish}",
        )

    def _streamed(self, chunks: Iterable[Completion]) -> Iterator[Completion]:
        began = False
        try:
            for chunk in chunks:
                if not began:
                    began = True
                    with self._lock:
                        self.streaming += 1
                yield chunk
        finally:
            if began:
                with self._lock:
                    self.streaming -= 1


class Batch:
    """Some requests at once; they run on beside the test, each to its end."""

    def __init__(self, url: str, size: int, max_tokens: int, *, stream: bool, model: str = MODEL) -> None:
        """They start with `begin`: to make an SDK's client can take seconds while servers have the machine."""
        self._client = Client(url, model=model)
        self._threads = ThreadPoolExecutor(size)
        self._asks = [partial(self._client.ask, max_tokens, stream=stream)] * size
        self._futures: list[Future[Result]] = []

    def begin(self) -> Batch:
        """Send them all."""
        self._futures = [self._threads.submit(ask) for ask in self._asks]
        return self

    @property
    def streaming(self) -> int:
        """How many have begun to stream and have not ended."""
        return self._client.streaming

    def results(self) -> list[Result]:
        """How they ended; waits for it."""
        results = [future.result() for future in self._futures]
        self._threads.shutdown()
        self._client.close()
        return results


def burst(url: str, size: int, max_tokens: int, *, stream: bool) -> list[Result]:
    """`size` requests at once, and how they ended."""
    return Batch(url, size, max_tokens, stream=stream).begin().results()


class _Threads:
    """Run for as long as the `with` block takes. They look at `_stop`; what they do at that moment is finished."""

    def __init__(self, *works: Callable[[], None]) -> None:
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=work) for work in works]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


class Load(_Threads):
    """Steady requests from some workers, each sending its next one soon after the last ended; half of them streamed.

    Ends with the `with` block: what runs is finished and counted. `pause_s`: what a worker waits between two requests.
    """

    def __init__(self, url: str, *, workers: int, max_tokens: int, pause_s: float = 0.05, padding: str = "") -> None:
        self.results: list[Result] = []
        self._client = Client(url, padding=padding)
        self._max_tokens = max_tokens
        self._pause_s = pause_s
        super().__init__(*(partial(self._work, number) for number in range(workers)))

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._client.close()

    def _work(self, number: int) -> None:
        while not self._stop.is_set():
            number += 1
            self.results.append(self._client.ask(self._max_tokens, stream=number % 2 == 0))
            self._stop.wait(self._pause_s)

    def since(self, when: float) -> list[Result]:
        """Those that began at `when` or later."""
        return [one for one in list(self.results) if one.began >= when]

    def answered(self, endpoint: str, since: float = 0.0) -> int:
        """How many this endpoint answered well."""
        return sum(one.endpoint == endpoint and not one.error for one in self.since(since))


@dataclass(frozen=True)
class Reading:
    """An engine's own gauges at one moment."""

    waiting: float
    running: float


class Watch(_Threads):
    """Reads the gauges of some servers, again and again, each in a thread of its own, for as long as the `with` block
    takes.
    """

    def __init__(self, watched: Sequence[LlmServer], pause_s: float = 0.05) -> None:
        self.readings: dict[str, list[Reading]] = {server.name: [] for server in watched}
        self._pause_s = pause_s
        super().__init__(*(partial(self._read, server) for server in watched))

    def _read(self, server: LlmServer) -> None:
        while not self._stop.wait(self._pause_s):
            page = server.page()
            waiting, running = (sum_of(page, f"vllm:num_requests_{state}") for state in ("waiting", "running"))
            self.readings[server.name].append(Reading(waiting, running))


def failures(results: Sequence[Result]) -> list[str]:
    return [one.error for one in results if one.error]


def told(results: Sequence[Result]) -> str:
    """The figures of some results, for people."""
    good = [one for one in results if not one.error]
    by = ", ".join(f"{name or 'direct'} {n}" for name, n in sorted(Counter(one.endpoint for one in good).items()))
    again = sum(one.attempts > 1 for one in good)
    wrong = "".join(f"; {n} x {error:.70}" for error, n in Counter(failures(results)).items())
    return f"{len(results)} requests, {len(good)} good ({by}), {again} of them by a further attempt{wrong}"
