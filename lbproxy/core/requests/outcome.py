# SPDX-License-Identifier: Apache-2.0
"""How requests end, and what the client gets in each case."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final


@dataclass(frozen=True)
class OutcomeFacts:
    """What an outcome means for the client."""

    code: str
    """The `code` of the error body, the metric label and the log field."""
    status: int
    """0: the status is the endpoint's."""
    error_type: str = ""
    message: str = ""
    """The error message, unless there is a more precise one."""
    retry_after: bool = False
    client_retry: bool = True
    """False: a retry by the client cannot help, or does harm (`x-should-retry: false`)."""
    close: bool = False
    """The client's connection cannot be used again."""
    param: str | None = None
    """The `param` of the error body: which part of the request is wrong."""


def _bad(
    code: str, status: int, message: str, *, close: bool = False, param: str | None = None, retry: bool = False
) -> OutcomeFacts:
    """The client's error. Claude Code repeats even a 401 ten times, in silence, unless it is told not to."""
    return OutcomeFacts(code, status, "invalid_request_error", message, client_retry=retry, close=close, param=param)


def _busy(code: str, status: int, message: str, *, close: bool = False) -> OutcomeFacts:
    """No error of the client: a later request may succeed."""
    kind = "rate_limit_error" if status == 429 else "server_error"
    return OutcomeFacts(code, status, kind, message, retry_after=True, close=close)


def _upstream(code: str, status: int, message: str) -> OutcomeFacts:
    """The endpoint's error; all useful attempts were made."""
    kind = "timeout_error" if status == 504 else "server_error"
    return OutcomeFacts(code, status, kind, message, client_retry=False)


class Outcome(Enum):
    """How a request ended. The metric label, the log field, the HTTP status and the error body derive from it.

    Codes and types are OpenAI's where OpenAI has one, so that its SDKs raise the right exception.
    """

    COMPLETED = OutcomeFacts("completed", 0)
    """The endpoint's response was sent completely, whatever its status."""
    UPSTREAM_BROKE = OutcomeFacts("upstream_broke", 0)
    """The endpoint failed after its first byte was sent: the client saw a broken response."""
    CUT = OutcomeFacts("lb_shutdown", 0, "server_error")
    """lbproxy stopped, and the response was not complete at the deadline of the drain: the client saw a broken
    response."""
    CLIENT_CLOSED = _bad("client_closed_request", 499, "The client closed the request.", close=True)

    BAD_REQUEST = _bad("bad_request", 400, "The request is not valid HTTP/1.1.", close=True)
    INVALID_JSON = _bad("invalid_json", 400, "The request body is not valid JSON.")
    MISSING_MODEL = _bad("missing_model", 400, "The request names no model.")
    RESERVED_FIELD = _bad("reserved_field", 400, "The request body has a field that only lbproxy itself may set.")
    # Claude Code says "Not logged in" in place of a message that has the name of the other header.
    UNAUTHORIZED = _bad(
        "invalid_api_key",
        401,
        "A valid API key is required: `Authorization: Bearer KEY`, or the header that Anthropic's SDKs send.",
        close=True,
    )
    FORBIDDEN = _bad("forbidden", 403, "This is not allowed through the load balancer.")
    UNKNOWN_URL = _bad("unknown_url", 404, "Unknown request URL. Paths begin with /v1; metrics are on the admin port.")
    MODEL_NOT_FOUND = _bad("model_not_found", 404, "The model does not exist.")
    RESPONSE_NOT_FOUND = _bad(
        "response_not_found",
        404,
        "The model server that stored this response, or object, is gone. Send what it held again, without the id.",
        param="response_id",
    )
    METHOD_NOT_ALLOWED = _bad("method_not_allowed", 405, "The method is not allowed here.")
    BODY_TIMEOUT = _bad("request_timeout", 408, "The request body did not arrive in time.", close=True, retry=True)
    TOO_LARGE = _bad("request_too_large", 413, "The request body is too large.", close=True)
    URI_TOO_LONG = _bad("uri_too_long", 414, "The request target is too long.", close=True)
    CONTENT_ENCODING = _bad("unsupported_content_encoding", 415, "Encoded request bodies are not supported.")
    WEBSOCKET_VERSION = _bad(
        "unsupported_websocket_version", 426, "WebSocket is spoken in version 13 (RFC 6455).", close=True
    )
    HEAD_TOO_LARGE = _bad("head_too_large", 431, "The request head is too large.", close=True)

    LOOP = OutcomeFacts(
        "loop_detected", 508, "server_error", "The request came back to this load balancer.", client_retry=False
    )

    SATURATED = _busy("rejected_saturated", 429, "All model servers are busy, and the queue is full or too long.")
    EXPIRED = _busy("rejected_ttl_expired", 429, "No model server had room in time.")
    RATE_LIMITED = _busy("rate_limit_exceeded", 429, "The limit of requests or tokens per minute is reached.")
    TOO_LATE = _busy("rejected_slo", 429, "The first token would arrive after the request's deadline.")
    NO_ENDPOINTS = _busy("no_endpoints", 503, "No model server is available.")
    DRAINING = _busy("lb_draining", 503, "The load balancer is shutting down.", close=True)
    OVERLOADED = _busy("lb_overloaded", 503, "The load balancer is out of resources.", close=True)

    CONNECT_FAILED = _upstream("upstream_connect_failed", 502, "No connection to a model server could be made.")
    UPSTREAM_RESET = _upstream("upstream_reset", 502, "The model server closed the connection before its response.")
    UPSTREAM_PROTOCOL = _upstream("upstream_protocol_error", 502, "The model server's response was not valid HTTP.")
    UPSTREAM_TIMEOUT = _upstream("upstream_timeout", 504, "The model server did not respond in time.")

    INTERNAL_ERROR = OutcomeFacts("internal_error", 500, "server_error", "The load balancer had an internal error.")
    """A defect of lbproxy: logged with its traceback."""

    __hash__ = object.__hash__  # by identity: Enum's own is Python code and takes 0.2 µs; each request looks up some

    @property
    def label(self) -> str:
        return self.value.code


LABEL_AND_STATUS: Final[dict[Outcome, tuple[str, int]]] = {one: (one.label, one.value.status) for one in Outcome}
"""An enum's `value` costs more than all the rest of a field, where each request needs them."""


class LbError(Exception):
    """A request to which lbproxy itself responds with an error. The only exception that crosses layers.

    `message` is for the client: it never contains an upstream address, a traceback or bytes of the request's body.
    `allow`: the Allow header of a 405. `retry_after_s`: when a retry would succeed, if that is known. `fields`: further
    field lines of the response, each with its CRLF.
    """

    def __init__(
        self,
        outcome: Outcome,
        message: str | None = None,
        *,
        param: str | None = None,
        allow: str | None = None,
        retry_after_s: float | None = None,
        fields: str = "",
    ) -> None:
        self.outcome = outcome
        self.message = outcome.value.message if message is None else message
        self.param = param or outcome.value.param
        self.allow = allow
        self.retry_after_s = retry_after_s
        self.fields = fields
        super().__init__(self.message)
