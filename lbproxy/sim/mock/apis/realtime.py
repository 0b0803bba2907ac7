# SPDX-License-Identifier: Apache-2.0
"""Events of the WebSocket /v1/realtime, in two dialects on one connection.

vLLM 0.32 has a transcription there and no more: `input_audio_buffer.append` and `.commit` in, `transcription.delta` and
`transcription.done` out, once `session.update` has named the model. Clients of OpenAI's realtime API send
`conversation.item.create` and `response.create`, and get `response.output_text.delta` and `response.done`.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field

from lbproxy.sim.mock.apis.call import GenerationCall, Identity, PlannedChoice, at_least_one
from lbproxy.sim.mock.apis.conversation import ConversationTurn, Turns, render
from lbproxy.sim.mock.apis.fields import EngineError, Json, dump, integer, text_of, typed
from lbproxy.sim.mock.apis.media import audio as audio_filler

MAX_AUDIO_BYTES = 8 * 2**20
"""Bytes of one utterance: four minutes."""
MAX_TURNS = 1024
"""Turns of one session; the oldest ones go first."""


@dataclass(slots=True)
class RealtimeSession:
    """One connection's conversation."""

    identity: Identity
    """`created` and `model` of the session; its id."""
    validated: bool
    """vLLM takes audio only after `session.update` has named the model. A model in the URL counts here."""
    instructions: str = ""
    turns: list[ConversationTurn] | None = None
    audio: bytearray = field(default_factory=bytearray)
    """What was appended since the last commit."""
    replies: int = 0
    events: int = 0

    def say(self, role: str, content: bytes) -> None:
        """One more turn."""
        self.turns = [*(self.turns or [])[1 - MAX_TURNS :], ConversationTurn(role, content)]

    def append(self, event: Json) -> None:
        """Audio in base64. Raises `EngineError` if it is none, or too much."""
        try:
            data = base64.b64decode(text_of(event, "audio") or "")
        except (binascii.Error, ValueError):
            data = b""
        if not data or len(self.audio) + len(data) > MAX_AUDIO_BYTES:
            raise EngineError(400, "Invalid audio data", "invalid_audio")
        self.audio += data

    def read_item(self, event: Json) -> None:
        """An item of the conversation: a message with text, or with a recording."""
        item = typed(event, "item", dict, "dictionary") or {}
        turns = Turns()
        content = turns.content(item.get("content") or item.get("output"), "item.content")
        self.say(text_of(item, "role") or "tool", content)

    def response_call(self, event: Json) -> GenerationCall:
        """What `response.create` asks for."""
        options = typed(event, "response", dict, "dictionary") or {}
        given = options.get("max_output_tokens")
        limit = None if given == "inf" else at_least_one(integer(options, "max_output_tokens"), "max_output_tokens")
        instructions = text_of(options, "instructions") or self.instructions
        system = [ConversationTurn("system", instructions.encode())] if instructions else []
        prompt = render([*system, *(self.turns or [])], [])
        return GenerationCall(model=self.identity.model, prompts=(prompt,), max_tokens=limit)

    def transcription_call(self) -> GenerationCall:
        """What a committed buffer asks for."""
        recording, self.audio = bytes(self.audio), bytearray()
        prompt = audio_filler(recording) + b"<|transcribe|>"
        return GenerationCall(model=self.identity.model, prompts=(prompt,), max_tokens=None)

    def created(self) -> str:
        """The first event of the connection: vLLM's fields, then OpenAI's."""
        session = {"id": self.identity.id, "type": "realtime", "model": self.identity.model}
        body: Json = {"type": "session.created", "id": self.identity.id, "created": self.identity.created}
        return self._event(body | {"session": session})

    def updated(self) -> str:
        """OpenAI's confirmation of `session.update`."""
        return self._event({"type": "session.updated", "session": {"type": "realtime", "model": self.identity.model}})

    def begin(self) -> list[str]:
        """The events before a reply's first token."""
        self.replies += 1
        return [self._event({"type": "response.created", "response": self._response("in_progress", None)})]

    def delta(self, text: str) -> str:
        """One token of a reply."""
        return self._event({"type": "response.output_text.delta", **self._place(), "delta": text})

    def end(self, choice: PlannedChoice, cached_tokens: int) -> list[str]:
        """The events after a reply's last token."""
        text = choice.answer.text.decode("ascii")
        used: Json = {
            "total_tokens": choice.prompt_tokens + choice.answer.tokens,
            "input_tokens": choice.prompt_tokens,
            "output_tokens": choice.answer.tokens,
            "input_token_details": {"text_tokens": choice.prompt_tokens, "cached_tokens": cached_tokens},
            "output_token_details": {"text_tokens": choice.answer.tokens},
        }
        status = "completed" if choice.answer.finish_reason == "stop" else "incomplete"
        item: Json = {
            "id": self._place()["item_id"],
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": text}],
        }
        body = self._response(status, used) | {"output": [item]}
        return [
            self._event({"type": "response.output_text.done", **self._place(), "text": text}),
            self._event({"type": "response.done", "response": body}),
        ]

    def _response(self, status: str, used: Json | None) -> Json:
        response_id = self._place()["response_id"]
        return {"object": "realtime.response", "id": response_id, "status": status, "output": [], "usage": used}

    def _place(self) -> Json:
        """Which reply an event belongs to."""
        response_id = self.identity.part("resp_", self.replies)
        item_id = self.identity.part("item_", self.replies)
        return {"response_id": response_id, "item_id": item_id, "output_index": 0, "content_index": 0}

    def _event(self, body: Json) -> str:
        self.events += 1
        return dump({"type": body["type"], "event_id": self.identity.part("event_", self.events), **body}).decode()


def transcript_delta(text: str) -> str:
    """One token of a transcription, in vLLM's form."""
    return dump({"type": "transcription.delta", "delta": text}).decode()


def transcript_done(choice: PlannedChoice) -> str:
    """The end of a transcription, in vLLM's form."""
    said = choice.answer
    used = {
        "prompt_tokens": choice.prompt_tokens,
        "total_tokens": choice.prompt_tokens + said.tokens,
        "completion_tokens": said.tokens,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }
    return dump({"type": "transcription.done", "text": said.text.decode("ascii"), "usage": used}).decode()


def error_event(message: str, code: str) -> str:
    """A refusal: vLLM's has a text under `error`."""
    return dump({"type": "error", "error": message, "code": code}).decode()
