# SPDX-License-Identifier: Apache-2.0
"""A conversation, from whichever API it came: turns of a role and its content, rendered to one prompt.

Chat, responses and messages fill the same `Turns`, so the same conversation is the same prompt through each. A tool
call is text in the assistant's turn, and media are bytes that stand for them (`media`): both begin on whole tokens
where that matters for the prefix cache.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lbproxy.sim.mock.apis.fields import EngineError, Json, bad_request, canonical, invalid, load_json, shown
from lbproxy.sim.mock.apis.media import audio_in, image_at, image_in
from lbproxy.sim.mock.apis.tools import Tool, call_text
from lbproxy.sim.mock.text import TOKEN_BYTES, pad, render_chat

MAX_MEDIA = 256
"""Images and recordings in one request: each is up to 64 KiB of prompt, whatever the length of its URL."""
THOUGHT_BEGINS = b"<think>\n"
_ASKED_BYTES = 4096
"""How much of the end of a user's turn is what a person writes. Agents put what they add before it, in tags."""
_TAGGED = re.compile(r"<([\w-]+)>.*?</\1>|^.*</[\w-]+>", re.DOTALL | re.ASCII)


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    """What one side said."""

    role: str
    content: bytes


def render(turns: Sequence[ConversationTurn], tools: Sequence[Tool]) -> bytes:
    """The prompt: tools first, as templates have them, then the turns, and the assistant's turn opened."""
    said: list[tuple[str, str | bytes]] = [(turn.role, turn.content) for turn in turns]
    if tools:
        said.insert(0, ("tools", "\n".join(tool.text for tool in tools)))
    return render_chat(said)


class Turns:
    """Turns as they are read; starts with those of a conversation that it continues."""

    def __init__(self, former: Sequence[ConversationTurn] = ()) -> None:
        self._said = [(turn.role, [turn.content]) for turn in former]
        self._media = 0

    @property
    def turns(self) -> list[ConversationTurn]:
        """All of them. Linear in their bytes."""
        return [ConversationTurn(role, b"".join(pieces)) for role, pieces in self._said]

    def add(self, role: str, content: bytes) -> None:
        """One more turn."""
        self._said.append((role, [content]))

    def extend_assistant(self, content: bytes) -> None:
        """What belongs to the assistant's turn that is being read, or begins one."""
        if self._said and self._said[-1][0] == "assistant":
            self._said[-1][1].append(content)
        else:
            self.add("assistant", content)

    def content(self, given: object, where: str) -> bytes:
        """A content: nothing, a text, or parts. Parts of unknown kinds count nothing. `where`: for the error."""
        if given is None:
            return b""
        if isinstance(given, str):
            return given.encode()
        if not isinstance(given, list):
            raise invalid("string_type", where, "Input should be a valid string or list", shown(given))
        pieces: list[bytes] = []
        size = 0
        for part in given:
            found, is_text = self._part(part)
            filler = b"" if is_text or not found else b"\n" * (-size % TOKEN_BYTES)
            pieces += (filler, found)
            size += len(filler) + len(found)
        return b"".join(pieces)

    def _part(self, part: object) -> tuple[bytes, bool]:
        """The bytes of one part, and whether they are text."""
        if not isinstance(part, dict):
            return (part.encode() if isinstance(part, str) else b""), True
        for name in ("text", "refusal"):
            if isinstance(part.get(name), str):
                return part[name].encode(), True
        medium = _medium(part)
        if medium:
            self._media += 1
            if self._media > MAX_MEDIA:
                raise bad_request(f"At most {MAX_MEDIA} image(s) may be provided in one prompt.")
        return medium, False


def thought(text: object) -> bytes:
    """Reasoning as the model writes it, and as it comes back in the history: whole tokens."""
    return pad(THOUGHT_BEGINS + f"{text}\n</think>\n".encode(), b"\n") if isinstance(text, str) and text else b""


def asked(turns: Sequence[ConversationTurn]) -> str:
    """What the user has just written; empty where something else is responded to, such as the result of a tool."""
    last = next((turn for turn in reversed(turns) if turn.role not in ("system", "developer")), None)
    if last is None or last.role != "user":
        return ""
    return _TAGGED.sub("", last.content[-_ASKED_BYTES:].decode("utf-8", "replace"))


def called(name: object, arguments: object) -> bytes:
    """A tool call that comes back in the history; arguments as an object or as its JSON."""
    if isinstance(arguments, str):
        try:
            arguments = load_json(arguments.encode())
        except EngineError:
            return call_text(str(name), str(arguments)).encode()
    return call_text(str(name), canonical(arguments if isinstance(arguments, dict) else {})).encode()


def _medium(part: Json) -> bytes:
    """What stands for an image or a recording, in the forms of the three APIs; empty for what is neither."""
    url = part.get("image_url")
    if isinstance(url, dict):
        url = url.get("url")
    if isinstance(url, str):
        return image_at(url)
    if isinstance(part.get("file_id"), str) and part.get("type") == "input_image":
        return image_at(f"file:{part['file_id']}")
    source = part.get("source")
    if part.get("type") == "image" and isinstance(source, dict):
        if isinstance(source.get("data"), str):
            return image_in(source["data"])
        return image_at(str(source.get("url")))
    recording = part.get("input_audio")
    if isinstance(recording, dict) and isinstance(recording.get("data"), str):
        return audio_in(recording["data"])
    return b""
