# SPDX-License-Identifier: Apache-2.0
"""Follow-ups of objects that one server has go to that server: files, batches, videos, conversations, jobs."""

from __future__ import annotations

import json

import pytest

from lbproxy.proxy.request.reading import SEARCHED_BYTES
from tests.support.aio import run
from tests.support.endpoint import LAST, Received, Script, ScriptedEndpoint, Wire, answer, chunk
from tests.support.rig import Reply, Rig, post, rig

CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
MISSING = answer(b'{"error":{"message":"no such object"}}', status=404)


def server(name: str, *, chunked: bool = False) -> Script:
    """Makes objects on POST to a collection, and knows those that it made, in paths and in bodies, and no other."""
    made: set[str] = set()

    async def script(wire: Wire, request: Received) -> None:
        words = request.path.replace("/", " ") + request.body.decode().replace('"', " ")
        if not all(one in made for one in words.split() if one.startswith("o-")):
            await wire.send(MISSING)
            return
        new = f"o-{name}{len(made)}"
        out = f"o-{name}out{len(made)}"
        made.update((new, out))
        said = json.dumps({"id": new, "output_file_id": out, "status": "done"}).encode()
        if chunked:
            await wire.send(CHUNKED, *(chunk(said[at : at + 9]) for at in range(0, len(said), 9)), LAST)
        else:
            await wire.send(answer(said))

    return script


def get(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


def body(**fields: object) -> bytes:
    return json.dumps(fields).encode()


async def made(it: Rig, path: str = "/v1/files") -> tuple[str, str, str | None]:
    """An object, another that its response names, and where they are."""
    reply = await it.ask(post(body(purpose="batch"), path))
    said = json.loads(reply.body)
    return said["id"], said["output_file_id"], reply.field("x-lbproxy-endpoint")


FOLLOW_UPS = {
    "GET": lambda one: get(f"/v1/files/{one}"),
    "content": lambda one: get(f"/v1/files/{one}/content?x=1"),
    "DELETE": lambda one: get(f"/v1/videos/{one}", "DELETE"),
    "cancel": lambda one: post(b"", f"/v1/batches/{one}/cancel"),
    "a job": lambda one: get(f"/v1/fine_tuning/jobs/{one}/events"),
    "remix": lambda one: post(body(prompt="again"), f"/v1/videos/{one}/remix"),
    "a batch of a file": lambda one: post(body(input_file_id=one, endpoint="/v1/x"), "/v1/batches"),
    "a job of a file": lambda one: post(body(model="m", training_file=one), "/v1/fine_tuning/jobs"),
    "a conversation": lambda one: post(body(model="m", input="hi", conversation=one), "/v1/responses"),
    "a conversation, as an object": lambda one: post(
        body(model="m", input="hi", conversation={"id": one}), "/v1/responses"
    ),
    "a chat about a file": lambda one: post(
        body(model="m", messages=[{"role": "user", "content": [{"type": "file", "file": {"file_id": one}}]}])
    ),
    "a long chat about a file": lambda one: post(
        body(
            model="m",
            messages=[
                {"role": "user", "content": [{"type": "file", "file": {"file_id": one}}]},
                {"role": "tool", "tool_call_id": "call_1", "content": "word " * (SEARCHED_BYTES // 4)},
            ],
        )
    ),
    "a long response about a file": lambda one: post(
        body(
            model="m",
            input=[
                {"role": "user", "content": [{"type": "input_file", "file_id": one}]},
                {"role": "user", "content": "word " * (SEARCHED_BYTES // 4)},
            ],
        ),
        "/v1/responses",
    ),
}


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("how", FOLLOW_UPS)
def test_a_follow_up_goes_to_the_server_that_has_the_object(how: str, chunked: bool) -> None:
    async def main() -> None:
        servers = [ScriptedEndpoint(server(name, chunked=chunked)) for name in "ab"]
        async with servers[0] as one, servers[1] as two, rig(one.url, two.url) as it:
            homes = set()
            for _ in range(6):
                first, second, home = await made(it)
                homes.add(home)
                for each in (first, second):
                    reply = await it.ask(FOLLOW_UPS[how](each))
                    assert (reply.status, reply.field("x-lbproxy-endpoint")) == (200, home)
                    assert reply.field("x-lbproxy-attempts") == "1"
            assert len(homes) == 2

    run(main())


def test_objects_that_nobody_remembers_are_looked_for_and_then_known() -> None:
    """As after a restart of lbproxy."""

    async def main() -> None:
        async with (
            ScriptedEndpoint(server("a")) as one,
            ScriptedEndpoint(server("b")) as two,
            rig(one.url, two.url) as before,
        ):
            there = [await made(before) for _ in range(4)]
            async with rig(one.url, two.url) as it:
                for first, _, home in there:
                    reply = await it.ask(get(f"/v1/files/{first}"))
                    assert (reply.status, reply.field("x-lbproxy-endpoint")) == (200, home)
                assert (await it.ask(get("/v1/files/o-never1"))).status == 404
            async with rig(one.url, two.url) as it:
                for first, _, home in there:
                    reply = await it.ask(FOLLOW_UPS["a conversation"](first))
                    assert (reply.status, reply.field("x-lbproxy-endpoint")) == (200, home)

    run(main())


def test_a_page_of_a_list_shows_what_its_server_has() -> None:
    async def main() -> None:
        def page(name: str) -> bytes:
            return answer(body(object="list", data=[{"id": f"video_{name}{n}"} for n in range(50)]))

        async with ScriptedEndpoint(page("a")) as one, ScriptedEndpoint(page("b")) as two, rig(one.url, two.url) as it:
            homes: dict[str, str | None] = {}
            while len(homes) < 2:
                reply: Reply = await it.ask(get("/v1/videos"))
                homes[json.loads(reply.body)["data"][0]["id"][6]] = reply.field("x-lbproxy-endpoint")
            for name, home in homes.items():
                for n in range(0, 50, 7):
                    reply = await it.ask(get(f"/v1/videos/video_{name}{n}/content"))
                    assert reply.field("x-lbproxy-endpoint") == home

    run(main())


def test_the_object_of_a_server_that_is_gone_is_not_found() -> None:
    async def main() -> None:
        async with (
            ScriptedEndpoint(server("a")) as one,
            ScriptedEndpoint(server("b")) as two,
            rig(one.url, two.url) as it,
        ):
            homes: dict[str | None, str] = {}
            while len(homes) < 2:
                first, _, home = await made(it)
                homes[home] = first
            await one.stop()
            for _ in range(3):
                reply = await it.ask(get(f"/v1/files/{homes['e1']}"))
                assert (reply.status, reply.field("x-lbproxy-reason")) == (404, "response_not_found")
            assert (await it.ask(get(f"/v1/files/{homes['e2']}"))).status == 200

    run(main())


def test_polling_a_response_does_not_forget_its_prompt() -> None:
    """GET shows the id of a response that is known, with the keys of its prompt: they stay."""

    async def main() -> None:
        async with ScriptedEndpoint(answer(body(id="resp_1", output=[]))) as one, rig(one.url) as it:
            await it.ask(post(body(model="m", input="hi " * 4000), "/v1/responses"))
            before = it.data_runtime.stored("resp_1")
            assert before is not None
            await it.ask(get("/v1/responses/resp_1"))
            after = it.data_runtime.stored("resp_1")
            assert after is not None
            assert after.block_keys == before.block_keys != ()

    run(main())
