# SPDX-License-Identifier: Apache-2.0
"""A running lbproxy's admin API, as the command line's commands use it.

Without a token from its user, a change is sent with the one that lbproxy made (control/admin/made_token.py): only to a
listener on this machine, which named a file that is its own by the port in its name, and that is ours to read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any, TypeAlias
from urllib.parse import quote

import httpx

from lbproxy.config.shown import without_values
from lbproxy.control.admin.made_token import file_name, read_token

TIMEOUT_S = 10.0
"""Also between two events, which come once a second."""

_PORTS = {"http": 80, "https": 443}

Fields: TypeAlias = dict[str, Any]
"""A JSON object."""


class AdminError(Exception):
    """It cannot be done; the text says why, and what to do. `status`: of the response; None: there was none."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class AdminClient:
    """One admin listener. Its methods raise AdminError."""

    def __init__(self, url: str, token: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.url = without_values(url)
        self._given = token or None
        self._made: str | None = None
        """The token that lbproxy made, once it was looked for."""
        self._looked = False
        unix = url.startswith("unix:")
        transport = httpx.HTTPTransport(uds=url.removeprefix("unix:")) if unix else None
        base = "http://localhost" if unix else url
        try:
            # No proxy of the environment's: it would be asked for 127.0.0.1, its own.
            self._client = httpx.Client(
                base_url=base, headers=headers, timeout=TIMEOUT_S, trust_env=False, transport=transport
            )
        except (httpx.InvalidURL, ValueError):
            raise AdminError(f"{self.url} is not a URL") from None

    def close(self) -> None:
        self._client.close()

    def get(self, *path: str, **query: int) -> Fields:
        """What is at /admin/ and these segments."""
        return self._ask("GET", path, query=query)

    def post(self, *path: str, within_s: float = TIMEOUT_S, body: Fields | None = None, **query: int) -> Fields:
        return self._ask("POST", path, within_s, body, query)

    def delete(self, *path: str, **query: str) -> Fields:
        return self._ask("DELETE", path, query=query)

    def token(self) -> str | None:
        """What changes need: the given token, or the one that lbproxy made; None if it made none."""
        if self._given is not None:
            return self._given
        with self._mapped(), self._client.stream("GET", _path(("state",))) as answer:
            is_own = _is_own(answer)  # its connection may be gone once it is read
            answer.read()
            path = self._read(answer).get("token_file")
        if path is None:
            return None
        name, url = file_name(self._client.base_url.port or _PORTS[self._client.base_url.scheme]), self.url
        if not is_own:
            raise AdminError(f"{url} is on another machine: set the token that is there in LBPROXY_ADMIN_TOKEN")
        if not isinstance(path, str) or not os.path.isabs(path) or os.path.basename(path) != name:
            raise AdminError(f"{url} names no file {name} as that of its token: set the token in LBPROXY_ADMIN_TOKEN")
        try:
            return read_token(path)
        except OSError as error:
            text = f"the admin token cannot be read from {path} ({error.strerror or error}): run this as lbproxy's user"
            raise AdminError(text) from None

    def _ask(
        self,
        method: str,
        path: tuple[str, ...],
        within_s: float = TIMEOUT_S,
        body: Fields | None = None,
        query: Mapping[str, int | str] | None = None,
    ) -> Fields:
        headers: dict[str, str] = {}
        if method != "GET":
            headers = {"Content-Type": "application/json"}
            if self._given is None:
                if not self._looked:
                    self._made, self._looked = self.token(), True
                if self._made is not None:
                    headers["Authorization"] = f"Bearer {self._made}"
        content = None if body is None else json.dumps(body)
        with self._mapped():
            return self._read(
                self._client.request(
                    method, _path(path), headers=headers, timeout=within_s, content=content, params=query or None
                )
            )

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
            text = f"{self.url} is not lbproxy: it returned {answer.status_code} without JSON"
            raise AdminError(text, answer.status_code)
        if answer.is_success:
            return value
        error = value.get("error")
        if not isinstance(error, dict):
            raise AdminError(f"{self.url} returned {answer.status_code}", answer.status_code)
        hint = " (set it in LBPROXY_ADMIN_TOKEN)" if answer.status_code == httpx.codes.UNAUTHORIZED else ""
        if error.get("code") == "unknown_endpoint":
            hint = " `lbproxy status` lists them."
        problems = [f"\n  {one}" for one in error.get("problems") or ()]
        raise AdminError(f"{error.get('message')}{hint}{''.join(problems)}", answer.status_code)


def _is_own(answer: httpx.Response) -> bool:
    """Whether it came from this machine."""
    stream = answer.extensions.get("network_stream")
    peer, own = (None if stream is None else stream.get_extra_info(name) for name in ("server_addr", "client_addr"))
    if not (isinstance(peer, tuple) and isinstance(own, tuple)):
        return False
    return bool(peer[0] == own[0] or ip_address(peer[0].partition("%")[0]).is_loopback)


def _path(segments: tuple[str, ...]) -> str:
    return "/admin/" + "/".join(quote(one, safe="") for one in segments)
