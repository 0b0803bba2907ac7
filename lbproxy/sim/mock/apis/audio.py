# SPDX-License-Identifier: Apache-2.0
"""/v1/audio: transcriptions and translations as vLLM 0.32 has them, with text that is made up from a hash of the file,
and speech, which vLLM itself does not have: a tone in a small WAV file.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from lbproxy.sim.mock.apis.call import (
    GenerationCall,
    Identity,
    PlannedChoice,
    Writer,
    output_tokens_of,
    prompt_tokens_of,
)
from lbproxy.sim.mock.apis.chat import DONE
from lbproxy.sim.mock.apis.fields import Json, bad_request, dump, invalid, model_of, required, server_event, shown
from lbproxy.sim.mock.apis.media import audio

MAX_PARTS = 64
MAX_SPEECH_SECONDS = 10.0
SPEECH_RATE = 24_000
"""Samples a second: OpenAI's speech."""
BYTES_PER_SECOND = 32_000
"""A file whose length cannot be read has 16-bit samples at 16 kHz."""
_BOUNDARY = re.compile(r'boundary="?([^";,]{1,70})', re.IGNORECASE)
_NAME = re.compile(rb'[; ]name="([^"\r\n]*)"')
_TRUE = ("true", "1", "yes", "on")


@dataclass(frozen=True, slots=True)
class AudioForm:
    """What a form says of its response."""

    task: str
    """transcribe or translate."""
    seconds: float
    verbose: bool
    language: str
    include_usage: bool


def parse_form(body: bytes, content_type: str) -> dict[str, bytes]:
    """The fields of a multipart form (RFC 7578); of two with one name the last."""
    named = _BOUNDARY.search(content_type)
    if not content_type.lower().startswith("multipart/form-data") or named is None:
        raise invalid("missing", "body.file", "Field required", "'input': None")
    # A line end before the first boundary as before the others.
    parts = (b"\r\n" + body).split(b"\r\n--" + named[1].encode(), MAX_PARTS)
    fields: dict[str, bytes] = {}
    for part in parts[1:]:
        head, blank, value = part.partition(b"\r\n\r\n")
        name = _NAME.search(head)
        if blank and name is not None:
            fields[name[1].decode("utf-8", "replace")] = value
    return fields


def parse(task: str, form: dict[str, bytes]) -> tuple[GenerationCall, AudioForm]:
    """A form of /v1/audio/transcriptions or /translations."""
    if "file" not in form:
        raise invalid("missing", "body.file", "Field required", shown(dict.fromkeys(form)))
    data = form["file"]
    if not data:
        raise bad_request("Invalid or unsupported audio file.")
    texts = {name: value.decode("utf-8", "replace") for name, value in form.items() if name != "file"}
    prompt = audio(data) + f"<|{task}|>{texts.get('language', '')}{texts.get('prompt', '')}".encode()
    call = GenerationCall(
        model=texts.get("model"), prompts=(prompt,), max_tokens=None, stream=texts.get("stream", "").lower() in _TRUE
    )
    verbose = texts.get("response_format") == "verbose_json"
    include_usage = texts.get("stream_include_usage", "").lower() in _TRUE
    return call, AudioForm(task, duration(data), verbose, texts.get("language", "en"), include_usage)


def duration(data: bytes) -> float:
    """Seconds of a WAV file; of others by their size."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE" and len(data) >= 44:
        rate = int.from_bytes(data[28:32], "little")
        return (len(data) - 44) / rate if rate else 0.0
    return len(data) / BYTES_PER_SECOND


class TranscriptionWriter(Writer):
    """One transcription or translation."""

    def __init__(self, identity: Identity, form: AudioForm) -> None:
        kind = "transcription.chunk" if form.task == "transcribe" else "translation.chunk"
        self._head = identity.head(kind)
        self._form = form

    def whole(self, choices: Sequence[PlannedChoice], cached_tokens: int) -> bytes:
        text, form = choices[0].answer.text.decode("ascii"), self._form
        if form.verbose:
            verbose: Json = {"duration": form.seconds, "language": form.language, "text": text}
            return dump(verbose | {"segments": [], "words": None})
        if form.task == "translate":
            return dump({"text": text})
        return dump({"text": text, "usage": {"type": "duration", "seconds": math.ceil(form.seconds)}})

    def token(self, choice: PlannedChoice, index: int, position: int) -> bytes:
        """One token, the last one with the reason of the end."""
        said: Json = {"delta": {"content": choice.answer.token(position)}}
        if choice.is_last(position):
            said |= {"finish_reason": choice.answer.finish_reason, "stop_reason": choice.answer.stop_reason}
        return self._event([said])

    def closing(self, choices: Sequence[PlannedChoice], cached_tokens: int) -> bytes:
        """The event that `stream_include_usage` asks for, and the end."""
        if not self._form.include_usage:
            return DONE
        prompt_tokens, output_tokens = prompt_tokens_of(choices), output_tokens_of(choices)
        total = prompt_tokens + output_tokens
        used = {"prompt_tokens": prompt_tokens, "total_tokens": total, "completion_tokens": output_tokens}
        return self._event([], usage=used) + DONE

    def _event(self, choices: list[Json], **more: object) -> bytes:
        return server_event(self._head | {"choices": choices} | more)


def parse_speech(fields: Json) -> tuple[str | None, str]:
    """A body of /v1/audio/speech: the model and the text."""
    given = required(fields, "input")
    if not isinstance(given, str):
        raise invalid("string_type", "body.input", "Input should be a valid string", shown(given))
    return model_of(fields), given


def wav(text: str) -> bytes:
    """A tone, as long as it takes to say the text at 15 characters a second."""
    samples = int(SPEECH_RATE * min(MAX_SPEECH_SECONDS, max(0.1, len(text) / 15)))
    wave = struct.pack("<60h", *(int(8000 * math.sin(math.tau * at / 60)) for at in range(60)))
    data = (wave * (samples // 60 + 1))[: samples * 2]
    form = struct.pack("<IHHIIHH", 16, 1, 1, SPEECH_RATE, SPEECH_RATE * 2, 2, 16)
    size = struct.pack("<I", 36 + len(data))
    return b"RIFF" + size + b"WAVEfmt " + form + b"data" + struct.pack("<I", len(data)) + data
