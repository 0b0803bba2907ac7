# SPDX-License-Identifier: Apache-2.0
"""Another model where a server dies, with OpenAI's SDK: in one process and several, over a reload; what shows it."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import openai
import pytest

from tests.support.process import lbproxy, mock

SETTINGS = "models: {large: {to: big}, big: {fallback: [small], fallback_after: 10s}}\nhealth: {interval: 500ms}\n"


@pytest.mark.parametrize("workers", ["", "workers: 2\n"])
def test_a_model_whose_server_died_is_served_by_another_one(tmp_path: Path, workers: str) -> None:
    with (
        mock("--model", "big") as (server, first),
        mock("--model", "small") as (_, second),
        lbproxy(tmp_path, [first, second], SETTINGS + workers) as (process, listen, admin),
    ):
        process.wait_for("serves big")
        process.wait_for("serves small")
        with openai.OpenAI(base_url=f"{listen}/v1", api_key="none", max_retries=0, timeout=60) as client:

            def ask(model: str, **more: str) -> tuple[str | None, str]:
                """Whole and streamed: the header, and how it ended."""
                asked = {"model": model, "prompt": "x", "max_tokens": 3, "extra_headers": more}
                raw = client.completions.with_raw_response.create(**asked)  # type: ignore[call-overload]
                streamed = client.completions.with_raw_response.create(**asked, stream=True)  # type: ignore[call-overload]
                assert streamed.headers.get("x-lbproxy-model") == raw.headers.get("x-lbproxy-model")
                reasons = {one.choices[0].finish_reason for one in streamed.parse() if one.choices}
                assert reasons >= {raw.parse().choices[0].finish_reason}
                return raw.headers.get("x-lbproxy-model"), raw.parse().model

            assert ask("big") == ask("large") == (None, "big")
            server.process.kill()
            assert ask("big") == ask("large") == ("small", "small")
            with pytest.raises(openai.InternalServerError) as refused:
                ask("big", **{"x-lbproxy-fallback": "0"})
            assert refused.value.code in {"no_endpoints", "upstream_connect_failed"}
            process.wait_for('(?s)("fallback_from":"big".*){4}')  # lines are written a little after the responses
            lines = [one for one in process.lines("request") if one.get("fallback_from")]
            assert {(one["model"], one["fallback_from"], one.get("alias")) for one in lines} == {
                ("small", "big", None),
                ("small", "big", "large"),
            }
            told = httpx.get(f"{admin}/admin/decisions/{lines[0]['id']}").json()
            assert (told["model"], told["fallback_from"]) == ("small", "big")
            page = httpx.get(f"{admin}/metrics").text
            assert 'lbproxy_fallbacks_total{model="big",target="small"} 4.0' in page

            config = tmp_path / "cfg.yaml"
            config.write_text(config.read_text().replace("fallback: [small], ", ""))
            process.process.send_signal(signal.SIGHUP)
            process.wait_for("settings reloaded")
            with pytest.raises(openai.InternalServerError):
                ask("big")
