# SPDX-License-Identifier: Apache-2.0
"""Which ids a response shows its server to have, and which a request names."""

from __future__ import annotations

import json

import pytest

from lbproxy.core.responses.objects import (
    MAX_BYTES,
    MAX_IDS,
    MAX_VALUES,
    find_objects,
    is_object_id,
    named_in_body,
    named_in_path,
    refers,
)
from lbproxy.core.responses.sse import BodyScanner


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"id": "file-abc123", "object": "file"}, ["file-abc123"]),
        (
            {"id": "batch_1", "input_file_id": "file-1", "output_file_id": "file-2", "error_file_id": None},
            ["batch_1", "file-1", "file-2"],
        ),
        ({"id": "ftjob-1", "result_files": ["file-1", "file-2"], "model": "m1"}, ["ftjob-1", "file-1", "file-2"]),
        (
            {"object": "list", "data": [{"id": "video_1"}, {"id": "video_2"}], "first_id": "video_1"},
            ["video_1", "video_2"],
        ),
        ({"id": "conv_9", "metadata": {"id": "conv_other1", "file_id": "file-9"}}, ["conv_9"]),
        ({"id": "default"}, []),
        ({"id": 7, "file_id": {}}, []),
        ({"id": "x" * 161 + "1"}, []),
        ([{"id": "file-1"}], []),
        ("file-1", []),
    ],
)
def test_what_a_response_shows(said: object, found: list[str]) -> None:
    body = json.dumps(said).encode()
    assert find_objects(body) == found
    scanner = BodyScanner(shows=True)
    for at in range(0, len(body), 7):
        scanner.feed(body, at, min(len(body), at + 7))
    assert scanner.objects() == found
    assert scanner.usage is None


def test_what_is_looked_at_is_bounded() -> None:
    many = json.dumps({"data": [{"id": f"f-{n}"} for n in range(5000)]}).encode()
    assert len(find_objects(many)) == MAX_IDS
    scanner = BodyScanner(shows=True)
    for _ in range(8):
        scanner.feed(b"x" * MAX_BYTES, 0, MAX_BYTES)
    assert scanner.objects() == find_objects(b"x" * 9) == []
    assert list(named_in_body({"list": [0] * MAX_VALUES, "x": {"file_id": "file-1"}})) == []
    deep: dict[str, object] = {"file_id": "file-1"}
    for _ in range(50):
        deep = {"x": deep}
    assert list(named_in_body(deep)) == []


def test_a_word_is_no_id() -> None:
    for text in ("jobs", "fine_tuning", "content", "input_items", "a-b", "", "x1", "file/1", "file-1\n"):
        assert not is_object_id(text), text
    for text in ("file-1", "batch_0a", "B5E8F0", "3fa85f64-5717-4562-b3fc-2c963f66afa6", "conv_x9"):
        assert is_object_id(text), text


def test_what_a_path_names() -> None:
    assert named_in_path("/v1/files/file-1/content") == ["file-1"]
    assert named_in_path("/v1/fine_tuning/jobs/ftjob-1/cancel") == ["ftjob-1"]
    assert named_in_path("/v1/vector_stores/vs_1/files/file-2") == ["vs_1", "file-2"]
    assert named_in_path("/v1/files") == named_in_path("/v1/files/") == named_in_path("/v1/x/%66ile-1") == []


def test_what_a_body_names() -> None:
    parts = [{"type": "text", "text": "file-9"}, {"type": "file", "file": {"file_id": "file-3"}}]
    body = {
        "input_file_id": "file-1",
        "conversation": {"id": "conv_1"},
        "metadata": {"file_id": "file-7"},
        "tools": [{"type": "file_search", "vector_store_ids": ["vs_1", "vs_2"]}],
        "messages": [{"role": "user", "content": parts}],
        "training_file": "file-2",
        "user": "user1",
    }
    assert list(named_in_body(body)) == ["file-1", "conv_1", "file-2", "vs_1", "vs_2", "file-3"]
    assert list(named_in_body({"conversation": "conv_2"})) == ["conv_2"]
    assert refers(body, "file_id")
    assert refers({"tools": body["tools"]}, "file_id", "_ids")
    assert not refers({"metadata": {"file_id": "file-7"}, "messages": parts[:1]}, "file_id", "_ids")
