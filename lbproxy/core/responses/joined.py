# SPDX-License-Identifier: Apache-2.0
"""One stream for the client, made of those of several servers, each of which goes on where the one before it broke.

What the first server sends passes unchanged, in whole events. Its text is kept, up to `MAX_TEXT_BYTES`: an event that
differs from the one before in its text alone is known by how it begins and ends, and the texts of many are read at
once. That is a quarter of what it costs to read an event. The events of later servers are written anew, with the id,
time and model of the first, without another role, and with the usage of all: the prompt is the client's, and what was
generated is a response, wherever it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import takewhile
from typing import Any, Final

import orjson

from lbproxy.core.requests.request import Usage

READ_BYTES: Final = 8 << 10
MAX_TEXT_BYTES: Final = 1 << 20
MAX_EVENT_BYTES: Final = 1 << 20
PIECE_BYTES: Final = 60
"""Of a short text, beside its characters, and its place in a list."""
DONE: Final = b"data: [DONE]\n\n"
_DATA: Final = b"data:"
_ENDS = (b"\n\n", b"\n\r\n", b"\r\r")
_IDENTITY = ("id", "created", "model")
_FAILED: Final = b'"error"'
_ABORTED: Final = b'"abort"'
_STRING_REST: Final = re.compile(rb'(?:[^"\\]|\\.)*"')
"""In an event by which a server says that it failed, and not where a text has these words, with escaped quotes."""


class JoinedStream:
    """The stream of one response of chat completions, or of completions."""

    def __init__(self, *, chat: bool) -> None:
        self._chat = chat
        self._tail = bytearray()
        """The beginning of an event that is not complete."""
        self.is_whole = True
        """What passed ends with an event: one of lbproxy's own can follow."""
        self._alike = AlikeEvents()
        self._identity: dict[str, Any] = {}
        self._said: list[str] = []
        """The text, by the events that have a token each: after a move, what was said before is one piece."""
        self.text_bytes = 0
        self.tokens = 0
        """About how many it has so far: of a server that sends several in one event one is counted, until it counts."""
        self._prompt_tokens: int | None = None
        self._told_usage = False
        """The event came that has nothing else."""
        self._seam: Seam | None = None
        """Where the present server goes on; None: it is the first."""
        self._finish: tuple[str, str] | None = None
        """Why the response ended, as the server said it, and the text that ended it, which the client does not get."""
        self.is_over = False
        """The event came that ends the stream."""
        self.obstacle: str | None = None
        """Why it cannot be continued."""
        self.failure: str | None = None
        """What the server said of its own failure, after which nothing of it passes."""

    def feed(self, piece: bytes) -> bytes:
        """The next piece of payload. Returns what goes to the client: whole events."""
        tail, data, is_whole = self._tail, piece, True
        if tail:
            seen = max(0, len(tail) - 2)
            tail += piece
            if len(tail) <= MAX_EVENT_BYTES and all(tail.find(mark, seen) < 0 for mark in _ENDS):
                return b""  # a long event in many reads is not searched, or copied, with each
            data = bytes(tail)
            tail.clear()
        if not data.endswith(b"\n\n"):
            whole = max(data.rfind(mark) + len(mark) if mark in data else 0 for mark in _ENDS)
            if len(data) - whole > MAX_EVENT_BYTES:
                self.give_up("an event is too long")
                is_whole = False
            else:
                tail += data[whole:]
                data = data[:whole]
        if self.failure is not None or not data:
            return b""
        self.is_whole = is_whole
        if self._alike.take(data):
            if len(self._alike.unread) >= READ_BYTES:
                self.read()
            return data
        self.read()
        if self.obstacle is None or self._seam is not None or _FAILED in data or _ABORTED in data:
            return self._event_by_event(data)
        return data

    @property
    def is_text(self) -> bool:
        """What `feed` returned last differs from an event before in its text alone, and none of it has a `usage`."""
        return self._alike.took and not self._alike.has_usage

    def read(self) -> None:
        texts = self._alike.read()
        if texts is None:
            self.give_up("an event cannot be read")
        elif self.obstacle is None:
            self.tokens += len(texts)
            self._note_texts(texts)

    def _event_by_event(self, data: bytes) -> bytes:
        """The same of other events. If the first of all says that the server failed, nothing began, and it passes like
        that of any stream. So do those of the first server otherwise.
        """
        began = self._seam is not None or bool(self._identity)
        passed: list[bytes] = []
        last: dict[str, Any] | None = None
        for event in data.replace(b"\r\n", b"\n").split(b"\n\n"):
            lines = event.split(b"\n")
            said = [one for one in lines if one.startswith(_DATA)]
            body = self._read_line(said[0]) if len(said) == 1 else None
            last = body or last
            if self.failure is not None and not began:
                self.give_up("it began with an error")
                self.failure = None
                return data
            if self.failure is not None:
                break
            began = began or body is not None
            if body is not None and self._seam is not None and not self.obstacle:
                event = self._as_one(body)  # noqa: PLW2901
            if event:
                passed.append(event + b"\n\n")
            if self.is_over:
                break
        if self._seam is not None or self.failure is not None:
            return b"".join(passed)
        self._alike.begin = b""
        if len(passed) == 1 and last is not None and self.obstacle is None:
            self._learn(data, last)
        return data

    def _learn(self, event: bytes, said: dict[str, Any]) -> None:
        """Learn from an event how those begin and end that differ in their text alone."""
        choices = said["choices"]
        if not choices or said.get("usage") or choices[0].get("finish_reason"):
            return
        name, delta = ("content", choices[0]["delta"]) if self._chat else ("text", choices[0])
        before, key, after = event.partition(b'"%b":"' % name.encode())
        literal = _STRING_REST.match(after)
        if literal is not None and key not in after and type(delta.get(name)) is str and not delta.get("role"):
            self._alike.begin, self._alike.end = before + key[:-1], after[literal.end() :]
            self._alike.has_usage = "usage" in said

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
        if text or not delta.get("role"):
            self.tokens += 1
        if text and self._seam is not None:
            delta[name] = text = self._seam.new_in(text)
            if self._seam.stopped:
                choice["finish_reason"] = "stop"
        if text or not delta.get("role"):
            self._note_texts([text])
        reason = choice.get("finish_reason")
        if reason == "abort":
            self.failure = "its server ended it"
        elif type(reason) is str and reason:
            stop = choice.get("stop_reason") or choice.get("matched_stop")  # vLLM, SGLang
            self._finish = reason, stop if type(stop) is str and not text.endswith(stop) else ""

    def _note_texts(self, texts: list[str]) -> None:
        self._said += texts
        self.text_bytes += len("".join(texts).encode("utf-8", "replace"))
        if self.text_bytes > MAX_TEXT_BYTES:
            self.give_up("its text is too long")

    def _note_usage(self, usage: object) -> None:
        """Note what a server says with each event, if its client asks for that."""
        if type(usage) is dict:
            prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
            if type(prompt) is int and type(completion) is int and self._seam is None:
                self._prompt_tokens = prompt
                self.tokens = max(self.tokens, completion - 1)  # this event counts itself

    def give_up(self, why: str) -> None:
        if self.obstacle is None:
            self.obstacle = why
        self._said.clear()

    def end(self) -> bytes:
        """The stream is complete. Returns what is left: an event that no empty line ended."""
        rest = bytes(self._tail)
        self._tail.clear()
        return rest

    @property
    def kept_bytes(self) -> int:
        """How much memory its text takes, about."""
        return self.text_bytes + PIECE_BYTES * len(self._said)

    # A server that goes on

    def move(self, stops: tuple[str, ...], held: int = 0, *, exactly: bool = True) -> str:
        """Another server goes on. Returns the text that it gets: without white space at its end, which templates may
        strip. `stops`: the texts that end the response; `held`: so many characters of what it had generated the server
        kept back, as they might begin one of them. So what came ends within a token, which no engine goes on with as if
        it were whole: if a server repeats `exactly` what another said, it gets the text up to the last whole token, and
        repeats the rest.
        """
        text, held = "".join(self._said), held if exactly else 0
        most = len(text.rstrip() if held else text)
        ends = ((at, many) for at, many in self._ends(held) if at <= most)
        end, tokens = next(ends)
        kept = text[:end].rstrip()
        again = 0 if end == len(kept) else 1 + sum(1 for _ in takewhile(lambda one: one[0] > len(kept), ends))
        self._said = [text]
        self._seam = Seam(text[len(kept) :], text, stops)
        self._seam.kept, self._seam.counted, self._seam.events = len(kept), text[:end], tokens
        self._seam.tokens = max(0, tokens - again)
        self.begin()
        return kept

    def begin(self) -> None:
        """A server begins to go on. What one before it sent in vain, of which the client got nothing, is forgotten."""
        self._tail.clear()
        self._alike.begin = b""
        self.failure = None
        if self._seam is not None:
            del self._said[1:]
            self.tokens = self._seam.tokens
            self._seam.begin()

    @property
    def counted(self) -> str:
        """The text whose tokens count as those of the servers before the present one."""
        assert self._seam is not None
        return self._seam.counted

    def count(self, tokens: int) -> None:
        """`counted` has so many tokens. If that is more than it had events, several came in one. White space at its end
        is generated again: one token, with or without what is before it, whatever it is within a text (SmolLM2 has two
        for an empty line before a word). So less is no news of what the servers generated.
        """
        seam = self._seam
        assert seam is not None
        if seam.events < tokens <= _most_tokens(seam.counted):
            self.tokens = seam.tokens = tokens - (len(seam.counted) > seam.kept)

    @property
    def finish_reason(self) -> str | None:
        """Why the response ended, as the server said it."""
        return None if self._finish is None else self._finish[0]

    @property
    def generated(self) -> str:
        """All that the servers wrote, also what ended it."""
        return "".join(self._said) + ("" if self._finish is None else self._finish[1])

    def count_all(self, tokens: int) -> bool:
        """`generated` has so many tokens, and one more that ended it if no text did. Returns whether that may be."""
        may_be = tokens <= _most_tokens(self.generated)
        if may_be:
            self.tokens = max(self.tokens, tokens + (self._finish is None or not self._finish[1]))
        return may_be

    def count_prompt(self, tokens: int) -> None:
        self._prompt_tokens = tokens

    @property
    def lacks_usage(self) -> bool:
        """No server told it, or how long the prompt is."""
        return self._prompt_tokens is None and not self._told_usage and not self.is_over

    def _ends(self, held: int) -> Iterator[tuple[int, int]]:
        """Where each token ends, in characters, and how many there are then, from the last one on. Each event came when
        there were `held` characters more than it sent.
        """
        sent, tokens = sum(map(len, self._said)), self.tokens
        for piece in reversed(self._said if self._seam is None else self._said[1:]):
            if piece and sent:
                yield sent + held, tokens
            sent -= len(piece)
            tokens -= 1
        yield (0, 0) if self._seam is None else (self._seam.kept, self.given)

    @property
    def given(self) -> int:
        """How many tokens of it are of the servers before the present one."""
        return 0 if self._seam is None else self._seam.tokens

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
        prompt = max(0, prompt - self.given) if self._prompt_tokens is None else self._prompt_tokens
        completion += self.given
        return usage | {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def joined(self, usage: Usage) -> Usage:
        """The usage of all, if a server that went on reported this one."""
        if self._seam is None or usage.prompt_tokens is None or usage.completion_tokens is None:
            return usage
        prompt = max(0, usage.prompt_tokens - self.given) if self._prompt_tokens is None else self._prompt_tokens
        cached = None if usage.cached_tokens is None else min(prompt, usage.cached_tokens)
        return usage._replace(
            prompt_tokens=prompt, cached_tokens=cached, completion_tokens=usage.completion_tokens + self.given
        )

    def ending(self, prompt_tokens: int | None) -> bytes:
        """The events that end it where no server does any more. `prompt_tokens`: for the event with the usage; None:
        the client wants none.
        """
        if self.is_over:
            return b""
        ends: list[bytes] = []
        kind = {"object": "chat.completion.chunk" if self._chat else "text_completion"}
        if self.finish_reason is None:
            self._finish = "length", ""
            choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
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


def _most_tokens(text: str) -> int:
    """A server that counts more is wrong."""
    return len(text.encode("utf-8", "replace"))


class AlikeEvents:
    """Events that differ in their text alone: it is gathered unread."""

    def __init__(self) -> None:
        self.begin = self.end = b""
        """Of an event, around its text. Empty: not known."""
        self.has_usage = False
        """It says null there."""
        self.took = False
        """What came last was like it."""
        self.unread = bytearray()
        """Texts in JSON, each with a comma."""

    def take(self, data: bytes) -> bool:
        """Whether these whole events are like that; their texts are gathered then."""
        begin, end = self.begin, self.end
        self.took = False
        if not (begin and data.startswith(begin) and data.endswith(end)):
            return False
        texts = data[len(begin) : -len(end)]
        if len(texts) > len(begin):
            texts = texts.replace(end + begin, b",")
        if texts.find(b"\n") >= 0:  # other events are between
            return False
        self.unread += texts + b","
        self.took = True
        return True

    def read(self) -> list[str] | None:
        """The texts gathered so far; None: they are no texts."""
        unread, self.unread = bytes(self.unread[:-1]), bytearray()
        try:
            texts: list[Any] = orjson.loads(b"[%b]" % unread)
        except orjson.JSONDecodeError:
            return None
        return texts if all(type(one) is str for one in texts) else None


class Seam:
    """The place where one server goes on after another."""

    def __init__(self, repeats: str, before: str, stops: tuple[str, ...]) -> None:
        """`repeats`: the white space that the client has and the server was not told of. `before`: the text so far."""
        self._all_repeats = repeats
        self._stops = stops
        self._most = max(map(len, stops), default=1) - 1
        self._before = before[-self._most :] if self._most else ""
        self.begin()
        self.kept = 0
        """So many characters the server was told of."""
        self.counted, self.events, self.tokens = "", 0, 0
        """The text whose tokens count, its events, and its tokens without those that are generated again."""
        self.stopped = False
        """One of `stops` was completed by the text of the server that goes on."""

    def begin(self) -> None:
        """Nothing came of the server that goes on."""
        self._repeats, self._after = self._all_repeats, ""

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
