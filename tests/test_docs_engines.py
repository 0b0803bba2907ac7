# SPDX-License-Identifier: Apache-2.0
"""docs/engines.md says what the tables say, and shows what they make of real pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from lbproxy.config.parse import parse
from lbproxy.config.sections.engines import BUILT_IN_ENGINES, MetricRatio, MetricSpec, Signal
from lbproxy.core.engines.dialects import ENGINES, SIGNALS, Engines, EngineTable
from lbproxy.core.engines.readings import PageReader, PageReading
from tests.support.docs import DOCS, blocks, expect_generated, table

PAGE = DOCS / "engines.md"
FIXTURES = Path(__file__).parent / "fixtures" / "metrics"
WALL_TIME = 1795230000.0
"""After all recordings."""


def spec_text(spec: MetricSpec | MetricRatio) -> str:
    if isinstance(spec, MetricRatio):
        return f"{spec_text(spec.used)} / {spec_text(spec.capacity)}"
    labels = ",".join(f"{name}={value}" for name, value in spec.labels)
    whole = f"`{spec.family}{{{labels}}}`" if labels else f"`{spec.family}`"
    return whole if spec.value_label is None else f"label `{spec.value_label}` of {whole}"


def signal_text(signal: Signal) -> str:
    return ", else ".join(map(spec_text, signal))


def optional(engine: EngineTable) -> list[tuple[str, Signal]]:
    """What is not a signal, as the page calls it."""
    named = ["waiting before that", "deferred", "cache in tokens", "slots", "awake", "work", "adapters"]
    return list(zip(named, engine.others().values(), strict=True))


def test_names() -> None:
    """Signals are the lines: the names are long, and nobody compares engines."""
    parts = []
    for name, engine in ENGINES.items():
        if not any(engine.signals().values()):
            continue
        port = "" if engine.location.port is None else f"port {engine.location.port}, "
        lines = [f"**`{name}`** ({port}`{engine.location.path}`)", ""]
        lines += [f"- `{signal}`: {signal_text(specs)}" for signal, specs in engine.signals().items() if specs]
        lines += [f"- {shown}: {signal_text(specs)}" for shown, specs in optional(engine) if specs]
        parts.append("".join(f"{line}\n" for line in lines))
    expect_generated(PAGE, "names", "\n".join(parts))


def value_text(reading: PageReading, name: str) -> str:
    if name in reading.missing:
        return "missing"
    value = None if reading.metrics is None else getattr(reading.metrics, name)
    return "-" if value is None else f"{value:.2f}" if name == "kv_utilization" else f"{value:,.0f}"


def reading_of(page: bytes, engine: str, engines: Engines) -> PageReading:
    return PageReader(engines.tables[engine], keep_s=0.0).read(page, scraped_at=0.0, wall_time=WALL_TIME)


@pytest.mark.parametrize("file", sorted(FIXTURES.rglob("*.prom")), ids=lambda file: file.stem)
def test_sources_are_what_their_folder_calls_them(file: Path) -> None:
    source = file.read_text().partition("\n# HELP")[0]
    documented = file.parent.name in {"documented", "rendered"}
    assert ("not from a running server" in " ".join(source.split("\n# "))) is documented
    assert ("recorded" in source) is not documented or "as llama.cpp-b11434-idle" in source


def test_the_own_engine_of_the_example_reads_the_page_of_the_example() -> None:
    texts = [block for block in blocks(PAGE) if block.language in {"text", "yaml"}]
    page, settings = texts[0].text.encode(), parse(texts[1].text, environ={})
    engines = Engines(settings.engines)
    assert settings.endpoints[0].engine == engines.detect(page) == "my-server"
    reading = reading_of(page, "my-server", engines)
    assert reading.missing == ()
    rows = [[f"`{signal}`", value_text(reading, signal)] for signal in SIGNALS]
    expect_generated(PAGE, "own engine", table(["signal", "value"], rows))


def test_configuration_names_every_built_in_engine() -> None:
    text = (DOCS / "configuration.md").read_text()
    assert all(f"`{name}`" in text for name in BUILT_IN_ENGINES)


def test_the_engine_behind_ray_of_the_example_reads_such_a_page() -> None:
    (text,) = (one.text for one in blocks(PAGE) if "ray-vllm" in one.text)
    engines = Engines(parse(text, environ={}).engines)
    labels = '{ReplicaId="r1",WorkerId="w1",model_name="tiny"}'
    values = {"num_requests_running": 3, "num_requests_waiting": 1, "kv_cache_usage_perc": 0.25}
    page = "".join(f"ray_vllm_{name}{labels} {value}\n" for name, value in values.items()).encode()
    assert engines.detect(page) == "ray-vllm"
    assert [value_text(reading_of(page, "ray-vllm", engines), signal) for signal in SIGNALS] == [
        "1",
        "3",
        "0.25",
        "-",
        "-",
    ]
