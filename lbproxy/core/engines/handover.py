# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode apart: the roles of endpoints, and how the KV cache of a prompt gets from one to the other."""

from __future__ import annotations

from enum import Enum
from types import MappingProxyType
from typing import Final, NamedTuple


class Role(Enum):
    """What an endpoint does of a request where prefill and decode are apart."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class Connector(NamedTuple):
    """How the KV cache of a prompt gets from the endpoint that computed it to the one that decodes."""

    concurrent: bool
    """Both legs are sent at once, and find each other; else decode is sent what prefill returned."""
    serves_whole: bool
    """A server with a role serves whole requests too, if asked without any hand-over."""


CONNECTORS: Final = MappingProxyType(
    {
        "nixl": Connector(concurrent=False, serves_whole=True),
        "shared-storage": Connector(concurrent=False, serves_whole=True),
        "mooncake": Connector(concurrent=True, serves_whole=True),
        "sglang": Connector(concurrent=True, serves_whole=False),
    }
)
"""By their names in the settings; docs/decisions/0041 has what each engine does."""
BOOTSTRAP_PORT: Final = 8998
"""The default of SGLang and of Mooncake's connector in vLLM."""


class Handover(NamedTuple):
    """An endpoint's part where prefill and decode are apart."""

    role: Role = Role.BOTH
    connector: str | None = None
    """One of `CONNECTORS`; None: none, or not known."""
    bootstrap_port: int = BOOTSTRAP_PORT
    """Where decode endpoints find a prefill endpoint with a concurrent connector, on its own host."""

    @property
    def how(self) -> Connector | None:
        """Its connector; None: it can hand nothing over."""
        return None if self.connector is None else CONNECTORS[self.connector]
