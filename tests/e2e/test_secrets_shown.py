# SPDX-License-Identifier: Apache-2.0
"""Everything that a running lbproxy says of its settings, searched for the secrets in them."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import httpx

from tests.support.process import LBPROXY, Process, changing, mock

SECRET = "hunter2hunter2hunter2"
PAGES = ("state", "config", "endpoints", "decisions", "history", "openapi.json", "log-level")
REFUSED = (
    "replicas: {{url: 'redis//:{}@h'}}",
    "replicas: {{url: 'redis://:{}@h:x'}}",
    "replicas: {{url: 'rediss://:{}@${{UNSET}}:6379'}}",
    "replicas: 'redis://:{}@h'",
    "traces: {{endpoint: 'http://c:4318/?api-key={}'}}",
    "cors: {{origins: ['https://u:{}@x']}}",
    "listen: ${{SECRET}}",
    "routing: {{policy: '${{SECRET}}'}}",
    "log: {{level: '${{UNSET:-{}}}'}}",
    "'{}+': 1",
    "log: {{level: {}",
)


def test_nothing_that_lbproxy_says_has_a_secret_of_its_settings(tmp_path: Path) -> None:
    """Queries of health and metrics pages that work or do not, webhooks, keys, and files that a reload refuses."""
    config = tmp_path / "cfg.yaml"
    with mock("--speed", "20") as (_, url):
        entries = (
            f"{{url: '{url}', name: a, health: '/health?api-key={SECRET}', metrics: '/metrics?api-key={SECRET}'}}",
            f"{{url: 'http://127.0.0.1:9', name: b, health: '/nothing?k={SECRET}', metrics: ':9/x?k={SECRET}'}}",
            f"{{url: 'http://localhost:9', name: c, health: null, metrics: '{url}/no?k={SECRET}', api_key: {SECRET}}}",
            f"{{url: 'http://127.0.0.2:9', name: d, models: [m], cold_start: '{url}/hook/{SECRET}?k={SECRET}'}}",
            f"{{url: 'http://127.0.0.3:9', name: e, proxy: 'http://u:{SECRET}@127.0.0.1:9'}}",
        )
        listed = "".join(f"  - {entry}\n" for entry in entries)
        good = f"listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\ndrain: {{lame_duck: 0s}}\nendpoints:\n{listed}"
        config.write_text(good)
        with Process("--config", str(config), env={"SECRET": SECRET}) as process:
            match = process.wait_for(r"listens on (http://[\w.:]+), admin on (http://[\w.:]+)")
            listen, admin = match[1], match[2]
            process.wait_for('"event":"scrape"')
            process.wait_for("a is up")
            httpx.post(f"{listen}/v1/completions?api-key={SECRET}", json={"model": "sim", "prompt": "x"})
            said = ""
            for number, form in enumerate(REFUSED):
                config.write_text(f"{good}{form.format(SECRET)}\n")
                answer = httpx.post(f"{admin}/admin/reload", headers=changing(admin))
                assert answer.status_code == 422, form
                said += answer.text
                process.process.send_signal(signal.SIGHUP)
                process.wait_for(
                    rf"(?s)(?>.*?\"event\":\"reload\"){{{2 * number + 2}}}"
                )  # atomic: else 2^n ways to fail
                if number > 4:  # it says the same, in a process of its own
                    continue
                env = {**os.environ, "SECRET": SECRET}
                checked = subprocess.run(
                    [*LBPROXY, "check", "--config", str(config)], capture_output=True, text=True, env=env, check=False
                )
                assert checked.returncode == 2
                said += checked.stdout + checked.stderr
            entry = {"url": f"http://u:{SECRET}@h:1", "health": f"x?{SECRET}", "api_key": f"{SECRET} ü"}
            said += httpx.post(f"{admin}/admin/endpoints", json=entry, headers=changing(admin)).text
            for page in PAGES:
                answer = httpx.get(f"{admin}/admin/{page}")
                assert answer.status_code == 200
                said += answer.text
            said += httpx.get(f"{admin}/metrics").text
            said += process.read()
        config.write_text(good)
        checked = subprocess.run(
            [*LBPROXY, "check", "--config", str(config)], capture_output=True, text=True, timeout=60, check=False
        )
        assert "of 5 endpoints can be used" in " ".join(checked.stdout.split()), checked
        said += checked.stdout + checked.stderr
    lines = [line for line in said.splitlines() if SECRET in line]
    assert not lines, [line[max(0, line.index(SECRET) - 200) : line.index(SECRET) + 30] for line in lines]
