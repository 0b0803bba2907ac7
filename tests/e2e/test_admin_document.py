# SPDX-License-Identifier: Apache-2.0
"""The admin API beside its own OpenAPI document: schemathesis asks, valid and not, and each answer is as declared."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.support.process import Process, changing, lbproxy, mock

CONFIG = Path(__file__).with_name("schemathesis.toml")
SPARES = [f"{{url: 'http://127.0.0.1:{n}', name: spare-{n}}}" for n in (1, 2, 3)]
"""Nobody listens there; they are for removing."""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Process, str]]:
    """lbproxy that has served requests and has a past; the URL of its admin listener."""
    with mock("--speed", "20", "--sleep-mode") as (_, one), mock("--speed", "20", "--sleep-mode") as (_, two):
        named = [f"{{url: '{one}', name: gpu-1, wake: true}}", f"{{url: '{two}', name: gpu-2, wake: true}}", *SPARES]
        with lbproxy(tmp_path, named) as (process, url, admin):
            for n in range(4):
                body = {"model": "sim" if n else "no-such-model", "prompt": "x", "max_tokens": 2, "stream": True}
                headers = {"x-request-id": f"request-{n}"}
                answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
                assert answer.status_code == (200 if n else 404), answer.text
            while not httpx.get(f"{admin}/admin/history").json()["points"]:
                time.sleep(0.1)
            yield process, admin


def closed(schema: Any) -> Any:
    """The same schema, but an object has the fields that are named and no others: what is shown is also declared."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    named = schema.get("type") == "object" and "properties" in schema
    return {"additionalProperties": False, **inner} if named else inner


def document_of(admin: str) -> Any:
    document = httpx.get(f"{admin}/admin/openapi.json").json()
    document["components"] = closed(document["components"])
    return document


def test_no_call_brings_out_a_5xx_or_an_answer_that_is_not_declared(site: tuple[Process, str], tmp_path: Path) -> None:
    process, admin = site
    document = document_of(admin)
    (tmp_path / "openapi.json").write_text(json.dumps(document))
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG), "run", "openapi.json"]
    token = changing(admin)["authorization"]
    options = ["--url", admin, "--no-color", "--report", "json", "--report-json-path", "report.json"]
    options += ["--header", f"Authorization: {token}"]
    ran = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    operations = [f"{method.upper()} {path}" for path, item in document["paths"].items() for method in item]
    assert report["operations"]["tested"] == len(operations) == 19
    phases = report["valid_rates"]
    succeeded = {name for name in operations if any(one["accepted"] for one in phases.get(name, {}).values())}
    assert succeeded == {*operations}, "each had a success to look at"
    assert httpx.get(f"{admin}/healthz").status_code == 200
    assert "Traceback" not in process.read()


def test_an_event_is_as_the_document_says(site: tuple[Process, str]) -> None:
    """OpenAPI 3.1 has no word for it, so schemathesis looks at the stream's head only."""
    _, admin = site
    document = document_of(admin)
    with httpx.stream("GET", f"{admin}/admin/events", timeout=20) as answer:
        data = next(line for line in answer.iter_lines() if line.startswith("data: "))
    frame = json.loads(data.removeprefix("data: "))
    assert frame["decisions"]
    assert frame["history"]
    schema = {"$ref": "#/components/schemas/Frame", "components": document["components"]}
    jsonschema.Draft202012Validator(schema).validate(frame)
    del frame["endpoints"][0]["share"]
    assert not jsonschema.Draft202012Validator(schema).is_valid(frame)
