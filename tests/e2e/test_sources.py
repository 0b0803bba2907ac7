# SPDX-License-Identifier: Apache-2.0
"""SRV records and a file of endpoints that change under load, in lbproxy as a user would run it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.test_dns import load, proxy, servers
from tests.support.aio import run, until
from tests.support.dns import DnsServer, Says

NAME = "_vllm._tcp.llm.test"
QUICK = ", interval: 50ms"
FAST = "drain: {lame_duck: 0s}\nhealth: {interval: 50ms, down_interval: 50ms, timeout: 2s, fall: 2, slow_start: 1ms}\n"


def test_srv_records_change_under_load(tmp_path: Path) -> None:
    """Records and targets come, go, vanish and fail: no request does."""

    async def main() -> None:
        with servers(2) as (port, processes):
            one, two = f"127.0.0.1:{port}", f"127.0.0.2:{port}"
            records = [f"10 1 {port} gpu-1.llm.test.", f"10 1 {port} gpu-2.llm.test."]
            zone = {
                NAME: Says(srv=records[:1]),
                "gpu-1.llm.test": Says(a=["127.0.0.1"], aaaa=["fd00::dead"]),
                "gpu-2.llm.test": Says(a=["127.0.0.2"]),
            }
            async with (
                DnsServer(zone) as dns,
                proxy(tmp_path, dns.address, f"srv+http://{NAME}", QUICK, FAST) as lb,
            ):
                await lb.until_up(one)
                async with load(lb.url) as it:

                    async def resolved() -> None:
                        asked = dns.asked("udp SRV")
                        await until(lambda: dns.asked("udp SRV") >= asked + 3)

                    await until(lambda: len(it.served) > 50)
                    dns.zone[NAME] = Says(srv=records)
                    await until(lambda: it.first(two) is not None)
                    dns.zone[NAME] = Says(srv=records[1:])
                    await lb.until_shown(f'lbproxy_dns_addresses{{name="{NAME}"}} 1.0')
                    await resolved()
                    last = it.last(one)
                    for answer in (Says(rcode="SERVFAIL"), Says(), Says(rcode="NXDOMAIN"), Says(srv=records[1:])):
                        dns.zone[NAME] = answer
                        for _ in range(3):
                            await resolved()
                    del dns.zone["gpu-2.llm.test"]  # the target vanishes, its server does not
                    for _ in range(3):
                        await resolved()
                    count = len(it.served)
                    await until(lambda: len(it.served) > count + 50)
                assert it.failed == []
                assert it.last(one) == last, "who is in no record gets nothing more"
                print(f"{len(it.served)} requests, none failed")

                # The lowest priority that answers: one, until it does not.
                dns.zone["gpu-1.llm.test"] = Says(a=["127.0.0.1"])
                dns.zone["gpu-2.llm.test"] = Says(a=["127.0.0.2"])
                dns.zone[NAME] = Says(srv=[records[0], f"20 1 {port} gpu-2.llm.test."])
                await lb.until_up(one)
                await lb.until_shown(f'lbproxy_dns_addresses{{name="{NAME}"}} 1.0')
                processes[0].stop()
                await lb.until_up(two)
                got = await lb.client.post(f"{lb.url}/v1/completions", json={"model": "sim", "prompt": "x"})
                assert (got.status_code, got.headers["x-lbproxy-endpoint"]) == (200, two)

    run(main(), timeout_s=110)


def test_a_file_changes_under_load(tmp_path: Path) -> None:
    """Endpoints and names in it come and go; what is wrong changes nothing, and is told once."""
    file = tmp_path / "gpus.yaml"

    def write(text: str) -> None:
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(file)

    async def main() -> None:
        with servers(2) as (port, _):
            one, two = f"127.0.0.1:{port}", f"127.0.0.2:{port}"
            write(f"- {{url: 'http://{one}', name: one}}\n")
            async with (
                DnsServer({"gpu.test": Says(a=["127.0.0.2"])}) as dns,
                proxy(tmp_path, dns.address, "file:gpus.yaml", QUICK, FAST) as lb,
            ):
                await lb.until_up("one")
                async with load(lb.url) as it:
                    await until(lambda: len(it.served) > 50)
                    write(json.dumps([{"url": f"http://{one}", "name": "one"}, f"http://{two}"]))
                    await until(lambda: it.first(two) is not None)
                    write(f"- http://{two}\n")
                    await lb.until_shown('lbproxy_file_endpoints{name="gpus.yaml"} 1.0')
                    twice = "- http://127.0.0.9:1\n" * 2
                    for n, bad in enumerate(
                        ("- http://", "", twice, "- {url: 'http://a', nam: x}", "x" * (1 << 21)), 1
                    ):
                        write(bad)
                        await lb.until_shown(f'lbproxy_file_reads_total{{name="gpus.yaml",result="invalid"}} {n}.0')
                        await lb.until_shown('lbproxy_file_valid{name="gpus.yaml"} 0.0')
                    file.unlink()
                    await lb.until_shown('lbproxy_file_reads_total{name="gpus.yaml",result="unreadable"} 1.0')
                    write("[]")
                    await lb.until_shown('lbproxy_file_valid{name="gpus.yaml"} 1.0')
                    await lb.until_shown('lbproxy_file_endpoints{name="gpus.yaml"} 1.0')
                    write(f"- dns+http://gpu.test:{port}\n")
                    await lb.until_shown(f'lbproxy_dns_addresses{{name="gpu.test:{port}"}} 1.0')
                    count = len(it.served)
                    await until(lambda: len(it.served) > count + 50)
                    write(f"- http://{one}\n")
                    await until(lambda: it.first(one) is not None)
                    await lb.until_shown('lbproxy_file_endpoints{name="gpus.yaml"} 1.0')
                assert it.failed == []
                assert {by for _, _, by in it.served} == {"one", one, two}
                print(f"{len(it.served)} requests, none failed")
                assert "lbproxy_dns_addresses" not in await lb.metrics(), "the name left with the file's entry"
                refused = [line for line in lb.process.lines("discovery") if "is refused" in str(line["message"])]
                assert len(refused) == 6, "once for each"
                assert "[0].nam: unknown key, did you mean name?" in lb.process.output

    run(main(), timeout_s=110)
