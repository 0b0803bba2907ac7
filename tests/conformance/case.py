# SPDX-License-Identifier: Apache-2.0
"""What a case is, and the words in which requests are written down."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

BODY = b'{"model":"m","prompt":"x"}'
LINE = "POST /v1/completions HTTP/1.1"


class Must(Enum):
    """What the RFC asks of any gateway."""

    REFUSE = "refuse"
    """Nothing goes on; an error, or the connection ends."""
    SERVE = "serve"
    """The endpoint gets it, once, and the client its answer."""
    EITHER = "either"
    """One of them: the RFC leaves it open, or it is a matter of taste."""


@dataclass(frozen=True)
class ClientCase:
    """What a client sends, and what comes of it."""

    group: str
    name: str
    section: str
    """Of RFC 9110 or 9112, or of what else."""
    send: bytes
    must: Must
    status: int
    """What lbproxy answers last."""
    closes: bool | None
    """And whether it ends the connection then. None: if it came in pieces, it does."""
    seen: int
    """How many requests the endpoint gets from lbproxy."""
    before: int
    """How many of them even if the case is refused: those that came before it."""
    most: int
    """How many if it is served."""
    answers: int
    """How many answers lbproxy gives."""
    body: bytes
    """What each of them has as its body."""
    ends: bool
    """The client closes its side after that."""
    no_continue: bool
    """There must not be a 100."""
    own: bool
    """About a path or limit of lbproxy's own: others are not asked."""


def http(*lines: str | bytes, body: bytes = BODY, first: str | bytes = LINE, host: bool = True) -> bytes:
    """A request with these field lines and this body; its length is not said unless a line says it."""
    head = [first, *(["Host: lb"] if host else []), "Content-Type: application/json", *lines, "", ""]
    return b"\r\n".join(one if isinstance(one, bytes) else one.encode("latin-1") for one in head) + body


OWN_VIA = "1.1 lbproxy (its own word)"
"""Stands for what the lbproxy that gets the case says of itself to endpoints: a word that is its own."""
LENGTH = f"Content-Length: {len(BODY)}"
GOOD = http(LENGTH)


def chunks(*sizes: int, body: bytes = BODY) -> bytes:
    """The body in chunks of these sizes, and a last one of what is left."""
    pieces, at = [], 0
    for size in (*sizes, len(body)):
        pieces.append(body[at : at + size])
        at += size
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces if piece) + b"0\r\n\r\n"


CHUNKED = "Transfer-Encoding: chunked"


def case(
    group: str,
    name: str,
    section: str,
    send: bytes,
    status: int = 200,
    must: Must | None = None,
    *,
    closes: bool | str | None = "if refused",
    seen: int | None = None,
    answers: int | None = None,
    body: bytes = BODY,
    ends: bool = False,
    no_continue: bool = False,
    own: bool = False,
) -> ClientCase:
    """With what follows from the status: an error is a refusal, of nothing that the endpoint saw, and ends it."""
    good = status < 400
    if must is None:
        must = Must.SERVE if good else Must.REFUSE
    ending = not good if isinstance(closes, str) else closes
    before = 0 if seen is None or good else seen
    seen = int(good) if seen is None else seen
    most = max(1, seen) if good else before + 1
    answers = max(1, seen) if answers is None else answers
    return ClientCase(
        group, name, section, send, must, status, ending, seen, before, most, answers, body, ends, no_continue, own
    )
