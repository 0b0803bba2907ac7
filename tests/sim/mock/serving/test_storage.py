# SPDX-License-Identifier: Apache-2.0
"""Prompts in a shared folder, as vLLM's ExampleConnector keeps them (docs/decisions/0041 section 5)."""

from pathlib import Path

import pytest

from lbproxy.sim.mock.connectors.storage import LAYERS, looked_up_as, stored_as
from tests.sim.mock.serving.pair import PROMPT, Pair, split, whole_text

BODY: dict[str, object] = {"prompt": PROMPT, "max_tokens": 20, "ignore_eos": True}


def folders(path: Path) -> list[Path]:
    """What is in it."""
    return list(path.iterdir())


def test_decode_loads_what_prefill_stored(tmp_path: Path) -> None:
    async def test(pair: Pair) -> None:
        first = await pair.post(pair.prefill, BODY | {"max_tokens": 1})
        assert first.json()["kv_transfer_params"] is None
        for _ in range(2):
            response = (await pair.post(pair.decode, BODY)).json()
            assert response["choices"][0]["text"] == expected
            assert response["usage"]["prompt_tokens_details"] == {"cached_tokens": 112}
        assert pair.decode.driver.engine.gauges().transfers == 2
        assert (await pair.metrics(pair.decode))["vllm:external_prefix_cache_hits_total"] > 112
        await pair.settled()
        # Nothing is ever deleted, and another start finds it.
        assert len(folders(tmp_path)) == 1

    expected = whole_text(BODY)
    split(test, connector="shared-storage", shared_storage_path=str(tmp_path))


def test_a_shorter_or_longer_prompt_is_no_match(tmp_path: Path) -> None:
    async def test(pair: Pair) -> None:
        await pair.post(pair.prefill, BODY)
        for other in (PROMPT[:-64], PROMPT + "x" * 64, "y" + PROMPT):
            await pair.post(pair.decode, BODY | {"prompt": other})
        assert pair.decode.driver.engine.gauges().transfers == 0

    split(test, connector="shared-storage", shared_storage_path=str(tmp_path))


@pytest.mark.parametrize(
    ("tokens", "hits"), [(16, False), (17, False), (18, True), (32, True), (33, False), (34, True)]
)
def test_one_token_more_than_whole_blocks_never_matches(tokens: int, hits: bool) -> None:
    prompt = b"four" * tokens
    name, saved = looked_up_as(prompt, "sim", None)
    assert (bool(saved) and name == stored_as(prompt, "sim", None)) == hits


def test_models_and_adapters_do_not_share() -> None:
    assert len({stored_as(b"x" * 400, *who) for who in (("a", None), ("b", None), ("a", "b"))}) == 3


def test_who_asks_too_early_reads_what_is_half_written(tmp_path: Path) -> None:
    """The folder is the match, whatever is in it."""

    async def test(pair: Pair) -> None:
        await pair.post(pair.prefill, BODY)
        for folder in folders(tmp_path):
            (folder / LAYERS).unlink()
        response = (await pair.post(pair.decode, BODY)).json()
        assert response["choices"][0]["text"] != expected
        assert pair.decode.driver.engine.gauges().garbage == 1

    expected = whole_text(BODY)
    split(test, connector="shared-storage", shared_storage_path=str(tmp_path))


def test_of_a_prompt_of_several_chunks_only_a_part_is_stored(tmp_path: Path) -> None:
    async def test(pair: Pair) -> None:
        body = BODY | {"prompt": PROMPT * 70}
        await pair.post(pair.prefill, body)
        assert [folders(folder) for folder in folders(tmp_path)] == [[]]

    split(test, connector="shared-storage", shared_storage_path=str(tmp_path))


def test_a_folder_that_cannot_be_made_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    async def test(_pair: Pair) -> None:
        raise AssertionError("it started")

    with pytest.raises(OSError, match="file"):
        split(test, connector="shared-storage", shared_storage_path=str(tmp_path / "file" / "folder"))
