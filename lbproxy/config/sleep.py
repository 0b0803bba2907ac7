# SPDX-License-Identifier: Apache-2.0
"""Settings of servers that sleep: what may be said of a group that shares GPUs, and of the webhook that starts one."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import PlainSerializer, SecretStr, field_validator, model_validator

from lbproxy.config.section import Section, ShortSection
from lbproxy.config.shown import without_path
from lbproxy.config.values import check_token, count, duration, expected, if_given, read_origin

MAX_HOSTS = 1024
HOST_NAME = re.compile(r"[A-Za-z0-9._:-]{1,64}")


class HostSettings(Section):
    """A group of endpoints that share GPUs."""

    awake: Annotated[int, count("1", "1024")] = 1
    """How many of the group may be awake at a time."""
    min_awake: Annotated[float, duration("1s", "1h")] = 10.0
    """An endpoint that has requests stays awake this long before another takes its place. With a drain, a sleep and a
    wake it must be below admission.queue_timeout."""


class ColdStartSettings(ShortSection):
    """A webhook that has an endpoint started which is not there at all: a URL, or a mapping."""

    url: Annotated[str, PlainSerializer(without_path, return_type=str, when_used="json")]
    """Gets a POST with a JSON object: endpoint, url, model, waiting."""
    timeout: Annotated[float, duration("1s", "2h")] = 600.0
    """The endpoint must be up by then; else the webhook is called again, with a back-off."""

    token: SecretStr | None = None
    """Sent to it as `Authorization: Bearer`. Write ${NAME} rather than the token."""

    _check_token = field_validator("token", mode="after")(if_given(check_token))

    @model_validator(mode="before")
    @classmethod
    def _from_url(cls, value: object) -> object:
        return {"url": value} if isinstance(value, str) else value

    @field_validator("url", mode="after")
    @classmethod
    def _is_url(cls, value: str) -> str:
        match = re.fullmatch(r"(https?://[^/?#]+)(/[!-~]*)?", value)
        if match is None or len(value) > 2048 or read_origin(match[1], root_only=True) is None:
            raise expected("http://host:port/path or https")
        return value


def check_host_name(value: str) -> str:
    """Raise the error to show if it can be none."""
    if not HOST_NAME.fullmatch(value):
        raise expected("1 to 64 letters, digits or any of ._:-")
    return value
