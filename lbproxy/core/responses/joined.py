# SPDX-License-Identifier: Apache-2.0
"""One stream for the client, made of those of several servers, each of which goes on where the one before it broke.

What the first server sends passes unchanged, in whole events. Its text is kept, up to `MAX_TEXT_BYTES`: events gather
until they have `READ_BYTES`, so that most events cost a copy and a look for two words. The events of later servers are
written anew, with the id, time and model of the first, without another role, and with the usage of all: the prompt is
the client's, and what was generated is a response, wherever it was.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from lbproxy.core.requests.request import Usage

READ_BYTES: Final = 8 << 10
MAX_TEXT_BYTES: Final = 1 << 20
MAX_EVENT_BYTES: Final = 1 << 20
MAX_MOVES: Final = 10
"""Each after new text: a request that ends each server is not sent to all of them."""
DONE: Final = b"data: [DONE]\n\n"
_DATA: Final = b"data:"
_ENDS = (b"\n\n", b"\n\r\n")
_IDENTITY = ("id", "created", "model")
_FAILED: Final = b'"error"'
_ABORTED: Final = b'"abort"'
"""In an event by which a server says that it failed, and not where a text has these words, with escaped quotes."""


class JoinedStream:
    """The stream of one response of chat completions, or of completions."""

    def __init__(self, *, chat: bool) -> None:
        self._chat = chat
        self._tail = b""
        """The beginning of an event that is not complete."""
        self._unread = bytearray()
        """Events of the first server that passed, and were not read yet."""
        self._identity: dict[str, Any] = {}
        self._said: list[str] = []
        """The text, by the events that have a token each: after a move, what was said before is one piece."""
        self.text_bytes = 0
        self._tokens = [0, 0, 0]
        """Of all servers; up to the last that did not end in white space; of the servers before the present one."""
        self._prompt_tokens: int | None = None
        self._told_usage = False
        """The event came that has nothing else."""
        self._seam: Seam | None = None
        """Where the present server goes on; None: it is the first."""
        self.moves = 0
        self.finish_reason: str | None = None
        """Why the response ended, as the server said it."""
        self.is_over = False
        """The event came that ends the stream."""
        self.obstacle: str | None = None
        """Why it cannot be continued."""
        self.failure: str | None = None
        """What the server said of its own failure, after which nothing of it passes."""

    def feed(self, piece: bytes) -> bytes:
        """The next piece of payload. Returns what goes to the client: whole events."""
        data = self._tail + piece if self._tail else piece
        self._tail = b""
        if not data.endswith(b"\n\n"):
            ends = [at + len(mark) for mark in _ENDS if (at := data.rfind(mark)) >= 0]
            end = max(ends, default=0)
            data, self._tail = data[:end], data[end:]
            if len(self._tail) > MAX_EVENT_BYTES:
                self.give_up("an event is too long")
                data, self._tail = data + self._tail, b""
        if self.failure is not None or not data:
            return b""
        if self._seam is not None or data.find(_FAILED) >= 0 or data.find(_ABORTED) >= 0:
            return self._event_by_event(data)
        self._unread += data
        if len(self._unread) >= READ_BYTES:
            self.read()
        return data

    @property
    def is_whole(self) -> bool:
        """An event of lbproxy's own can follow what the client has."""
        return self.obstacle is None or not self.obstacle.startswith("an event")

    def read(self) -> None:
        """Read what passed unread."""
        unread, self._unread = bytes(self._unread), bytearray()
        if self.obstacle is None:
            for line in unread.split(b"\n"):
                if line.startswith(_DATA):
                    self._read_line(line)

    def _event_by_event(self, data: bytes) -> bytes:
        """The same of events that may say that the server failed, or are of a server that goes on. If the first event
        of all says so, nothing began, and it passes like that of any stream.
        """
        self.read()
        began = self._seam is not None or bool(self._identity)
        passed: list[bytes] = []
        for event in data.replace(b"\r\n", b"\n").split(b"\n\n"):
            lines = event.split(b"\n")
            said = [one for one in lines if one.startswith(_DATA)]
            body = self._read_line(said[0]) if len(said) == 1 else None
            if self.failure is not None and not began:
                self._unread += data
                self.read()
                self.failure = None
                return data
            if self.failure is not None:
                break
            began = began or bool(event)
            if body is not None and self._seam is not None and not self.obstacle:
                event = self._as_one(body)  # noqa: PLW2901
            if event:
                passed.append(event + b"\n\n")
            if self.is_over:
                break
        return b"".join(passed)

    # One event

    def _read_line(self, line: bytes) -> dict[str, Any] | None:
        """Read the data of an event. Returns it, if it is an object."""
        text = line[len(_DATA) :].strip()
        if text == b"[DONE]":
            self.is_over = True
            return None
        try:
            said: Any = orjson.loads(text)
        except orjson.JSONDecodeError:
            said = None
        choices: Any = said.get("choices") if type(said) is dict else None
        if type(choices) is not list:
            if type(said) is dict and "error" in said:
                self.failure = f"its server said: {orjson.dumps(said['error'])[:500].decode('utf-8', 'replace')}"
            else:
                self.give_up("an event cannot be read")
            return None
        if not self._identity:
            self._identity = {name: said[name] for name in _IDENTITY if name in said}
        self._note_usage(said.get("usage"))
        self._told_usage = not choices and type(said.get("usage")) is dict
        if len(choices) > 1 or (choices and type(choices[0]) is not dict):
            self.give_up("it has several choices")
        elif choices:
            self._read_choice(choices[0])
        found: dict[str, Any] = said
        return found

    def _read_choice(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta") if self._chat else choice
        if type(delta) is not dict:
            self.give_up("an event cannot be read")
            return
        for name in ("tool_calls", "function_call", "reasoning", "reasoning_content", "refusal", "audio"):
            if delta.get(name):
                self.give_up(f"it has `{name}`")
        name = "content" if self._chat else "text"
        text = delta.get(name)
        if type(text) is not str:
            text = ""
        if text or "role" not in delta:
            self._tokens[0] += 1
        if text and self._seam is not None:
            delta[name] = text = self._seam.new_in(text)
            if self._seam.stopped:
                choice["finish_reason"] = "stop"
        if text:
            self._note_text(text)
        elif "role" not in delta:
            self._said.append("")
        reason = choice.get("finish_reason")
        if reason == "abort":
            self.failure = "its server ended it"
        elif type(reason) is str and reason:
            self.finish_reason = reason

    def _note_text(self, text: str) -> None:
        self._said.append(text)
        self.text_bytes += len(text.encode("utf-8", "replace"))
        if not text.isspace():  # of a token that ends in white space the first part is generated again
            self._tokens[1] = self._tokens[0] - text[-1].isspace()
        if self.text_bytes > MAX_TEXT_BYTES:
            self.give_up("its text is too long")

    def _note_usage(self, usage: object) -> None:
        """Note what a server says with each event, if its client asks for that."""
        if type(usage) is dict:
            prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
            if type(prompt) is int and type(completion) is int and self._seam is None:
                self._prompt_tokens = prompt
                self._tokens[0] = max(self._tokens[0], completion - 1)  # this event counts itself

    def give_up(self, why: str) -> None:
        """It will not be continued."""
        if self.obstacle is None:
            self.obstacle = why
        self._said.clear()

    # A server that goes on

    def move(self, stops: tuple[str, ...], held: int = 0, *, exactly: bool = True) -> tuple[str, int]:
        """Another server goes on. Returns the text that it gets, and how many tokens that is: without white space at
        its end, which templates may strip. `stops`: the texts that end the response; `held`: so many characters of what
        it had generated the server kept back, as they might begin one of them. So what came ends within a token, which
        no engine goes on with as if it were whole: if a server repeats `exactly` what another said, it gets the text up
        to the last whole token, and repeats the rest.
        """
        text = "".join(self._said)
        kept, tokens = text.rstrip(), self._tokens[1]
        if held:
            end, whole = self._whole_tokens(len(kept), held)
            if exactly:
                kept, tokens = text[:end].rstrip(), whole - text[:end][-1:].isspace()
            else:
                tokens = whole + round((len(kept) - end) * self._tokens[0] / (len(text) + held))
        self._said = [text]
        self._tail = b""
        self._tokens[0] = self._tokens[2] = self._tokens[1] = max(0, tokens) if kept else 0
        self.moves += 1
        self._seam = Seam(text[len(kept) :], text, stops)
        self._seam.kept = len(kept)
        self.failure = None
        return kept, self._tokens[0]

    def _whole_tokens(self, end: int, held: int) -> tuple[int, int]:
        """Where the last token ends that ends before `end`, in characters, and how many tokens that is. Each event came
        when there were `held` characters more than it sent.
        """
        sent, tokens = sum(map(len, self._said)), self._tokens[0]
        for piece in reversed(self._said if self._seam is None else self._said[1:]):
            if piece and sent and sent + held <= end:
                return sent + held, tokens
            sent -= len(piece)
            tokens -= 1
        return (0, 0) if self._seam is None else (self._seam.kept, self._tokens[2])

    def _as_one(self, said: dict[str, Any]) -> bytes:
        """An event of a server that goes on, as one of the first server. Empty: it says nothing new."""
        said.update(self._identity)
        usage, choices = said.get("usage"), said["choices"]
        if type(usage) is dict:
            said["usage"] = self._usage_of_all(usage)
        if choices:
            choice = choices[0]
            delta, name = (choice["delta"], "content") if self._chat else (choice, "text")
            delta.pop("role", None)
            if not delta.get(name) and not choice.get("finish_reason") and not usage:
                return b""
        return b"data: " + orjson.dumps(said)

    @property
    def is_stopped(self) -> bool:
        """A text that ends the response stands across the place where servers changed: what follows is not wanted."""
        return self._seam is not None and self._seam.stopped

    def _usage_of_all(self, usage: dict[str, Any]) -> dict[str, Any]:
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if type(prompt) is not int or type(completion) is not int:
            return usage
        before = self._tokens[2]
        prompt = max(0, prompt - before) if self._prompt_tokens is None else self._prompt_tokens
        completion += before
        return usage | {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def joined(self, usage: Usage) -> Usage:
        """The usage of all, if a server that went on reported this one."""
        if self._seam is None or usage.prompt_tokens is None or usage.completion_tokens is None:
            return usage
        before = self._tokens[2]
        prompt = max(0, usage.prompt_tokens - before) if self._prompt_tokens is None else self._prompt_tokens
        cached = None if usage.cached_tokens is None else min(prompt, usage.cached_tokens)
        return usage._replace(
            prompt_tokens=prompt, cached_tokens=cached, completion_tokens=usage.completion_tokens + before
        )

    @property
    def tokens(self) -> int:
        """About how many tokens it has so far."""
        return self._tokens[0]

    def ending(self, prompt_tokens: int | None) -> bytes:
        """The events that end it where no server does any more. `prompt_tokens`: for the event with the usage; None:
        the client wants none.
        """
        if self.is_over:
            return b""
        ends: list[bytes] = []
        kind = {"object": "chat.completion.chunk" if self._chat else "text_completion"}
        if self.finish_reason is None:
            self.finish_reason = "length"
            choice: dict[str, Any] = {"index": 0, "finish_reason": self.finish_reason}
            if self._chat:
                choice["delta"] = {}
            else:
                choice["text"] = ""
            ends.append(b"data: " + orjson.dumps({**self._identity, **kind, "choices": [choice]}) + b"\n\n")
        if prompt_tokens is not None and not self._told_usage:
            prompt = prompt_tokens if self._prompt_tokens is None else self._prompt_tokens
            usage = {"prompt_tokens": prompt, "completion_tokens": self.tokens, "total_tokens": prompt + self.tokens}
            ends.append(b"data: " + orjson.dumps({**self._identity, **kind, "choices": [], "usage": usage}) + b"\n\n")
        self.is_over = True
        return b"".join(ends) + DONE


class Seam:
    """The place where one server goes on after another."""

    def __init__(self, repeats: str, before: str, stops: tuple[str, ...]) -> None:
        """`repeats`: the white space that the client has and the server was not told of. `before`: the text so far."""
        self._repeats = repeats
        self._stops = stops
        self._most = max(map(len, stops), default=1) - 1
        self._before = before[-self._most :] if self._most else ""
        self._after = ""
        self.kept = 0
        """So many characters the server was told of."""
        self.stopped = False
        """One of `stops` was completed by the text of the server that goes on."""

    def new_in(self, text: str) -> str:
        """What of the next text the client does not have yet."""
        if self._repeats:
            same = 0
            while same < min(len(text), len(self._repeats)) and text[same] == self._repeats[same]:
                same += 1
            self._repeats = self._repeats[same:] if same == len(text) else ""
            text = text[same:]
        if self._before and len(self._after) < self._most:
            text = self._until_stop(text)
        return text

    def _until_stop(self, text: str) -> str:
        seen = self._before + self._after
        whole, begin = seen + text, len(self._before)
        for stop in self._stops:
            at = whole.find(stop)
            if 0 <= at < begin < at + len(stop):
                self.stopped = True
                return ""
        self._after += text
        return text
