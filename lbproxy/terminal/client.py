# SPDX-License-Identifier: Apache-2.0
"""A running lbproxy's admin API, as the command line's commands use it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias
from urllib.parse import quote

import httpx

TIMEOUT_S = 10.0
"""Also between two events, which come once a second."""

Fields: TypeAlias = dict[str, Any]
"""A JSON object."""


class AdminError(Exception):
    """It cannot be done; the text says why, and what to do."""


class AdminClient:
    """One admin listener. Its methods raise AdminError."""

    def __init__(self, url: str, token: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.url = url
        unix = url.startswith("unix:")
        transport = httpx.HTTPTransport(uds=url.removeprefix("unix:")) if unix else None
        base = "http://localhost" if unix else url
        try:
            # No proxy of the environment's: it would be asked for 127.0.0.1, its own.
            self._client = httpx.Client(
                base_url=base, headers=headers, timeout=TIMEOUT_S, trust_env=False, transport=transport
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise AdminError(f"{url} is not a URL: {error}") from None

    def close(self) -> None:
        """Let go of its connections."""
        self._client.close()

    def get(self, *path: str) -> Fields:
        """What is at /admin/ and these segments."""
        return self._ask("GET", path)

    def post(self, *path: str) -> Fields:
        """Do what is there."""
        return self._ask("POST", path)

    def _ask(self, method: str, path: tuple[str, ...]) -> Fields:
        with self._mapped():
            answer = self._client.request(
                method, _path(path), headers={"Content-Type": "application/json"} if method == "POST" else {}
            )
            return self._read(answer)

    def events(self) -> Iterator[Fields]:
        """The state, once a second, until the connection breaks."""
        with self._mapped(), self._client.stream("GET", _path(("events",))) as answer:
            if answer.status_code != httpx.codes.OK:
                answer.read()
                self._read(answer)
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        """The library's exceptions as ours."""
        try:
            yield
        except httpx.UnsupportedProtocol:
            raise AdminError(f"{self.url}: expected http://host:port") from None
        except (httpx.ConnectError, httpx.ConnectTimeout):
            text = f"{self.url} cannot be reached: does lbproxy run there, and is this its `admin` address?"
            raise AdminError(f"{text} Set another with --admin HOST:PORT or unix:/PATH") from None
        except (httpx.HTTPError, ValueError) as error:
            raise AdminError(f"{self.url}: {error or type(error).__name__}") from None

    def _read(self, answer: httpx.Response) -> Fields:
        try:
            value = answer.json()
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise AdminError(f"{self.url} is not lbproxy: it returned {answer.status_code} without JSON")
        if answer.is_success:
            return value
        error = value.get("error")
        if not isinstance(error, dict):
            raise AdminError(f"{self.url} returned {answer.status_code}")
        hint = " (set it in LBPROXY_ADMIN_TOKEN)" if answer.status_code == httpx.codes.UNAUTHORIZED else ""
        if error.get("code") == "unknown_endpoint":
            hint = " `lbproxy status` lists them."
        problems = [f"\n  {one}" for one in error.get("problems") or ()]
        raise AdminError(f"{error.get('message')}{hint}{''.join(problems)}")


def _path(segments: tuple[str, ...]) -> str:
    return "/admin/" + "/".join(quote(one, safe="") for one in segments)
