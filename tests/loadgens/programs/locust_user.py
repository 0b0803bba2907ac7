# SPDX-License-Identifier: Apache-2.0
"""A user of Locust: complete responses, one after the other."""

from locust import HttpUser, task


class Asking(HttpUser):
    @task
    def ask(self):
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 32}
        self.client.post("/v1/chat/completions", json=body)
