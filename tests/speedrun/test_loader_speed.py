"""How many tokens a second the host side delivers, on 8 (fake) devices.

Everything that stands between a shard and the devices: finding the documents, packing the rows of
the speedrun's largest stage, reading, candidates, what each device asks of the n-gram table, and
putting it all on the devices. The test asks for four times what a run of 120 s takes on average.
"""

import time
from dataclasses import replace

import jax
import numpy as np
import pytest
from conftest import write_shard
from programs import mesh_of

import train_gpt as T

NEED = T.PRESETS["speedrun"].total_tokens / 120  # tokens/s, 2.7 million


def write_documents(folder, tokens: int):
    """A shard of documents as long as those of the web: 700 tokens on average, half below 380."""
    rng = np.random.default_rng(0)
    ids = (50_256 * rng.random(tokens, np.float32) ** 12).astype(np.uint16)  # some are common
    lengths = rng.lognormal(np.log(380), 1.1, tokens // 300).astype(int) + 2
    starts = np.cumsum(lengths) - lengths[0]
    ids[starts[starts < tokens]] = 50_256
    write_shard(folder / "web_train_000001.bin", ids)


def tokens_per_second(folder) -> float:
    """Drains what there is in batches of the speedrun's largest stage."""
    largest = max(T.PRESETS["speedrun"].stages, key=lambda stage: stage.batch_tokens)
    stage = replace(largest, share=1.0, candidates=largest.candidates[:1])
    cfg = T.validate(replace(T.PRESETS["speedrun"], stages=(stage,), steps=10_000, extension=0))
    stream, done = T.TokenStream(folder, "train", cfg.bos), 0
    start = time.perf_counter()
    try:
        for batch, _ in T.train_batches(
            cfg, mesh_of(8), stream, [], 0, T.loader_state(cfg, mesh_of(8))
        ):
            jax.block_until_ready((batch.rows, batch.requests))
            done += stage.batch_tokens
    except T.UserError as error:
        assert "tokens in" in str(error) and done  # the end of the shard
        return done / (time.perf_counter() - start)


@pytest.mark.slow
def test_the_loader_delivers_four_times_what_the_fastest_run_takes(tmp_path):
    write_documents(tmp_path, 100_000_000)  # a full shard
    speed = max(tokens_per_second(tmp_path) for _ in range(3))  # others use the cores too
    print(f"{speed:,.0f} tokens/s, {speed / NEED:.1f} times what a run of 120 s takes")
    assert speed > 4 * NEED
