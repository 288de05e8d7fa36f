"""The offline engine: SGLang's arguments and answers in plain Python, and nothing left afterwards."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import sgray as sgl
from sgray.errors import ConfigError, EngineError, InvalidRequestError
from sgray.lang.errors import UnavailableError

GREEDY = {"temperature": 0, "max_new_tokens": 5}
ROOT = Path(__file__).parents[2]


def test_an_answer_has_sglangs_form_and_a_list_its_order(engine: sgl.Engine) -> None:
    one = engine.generate("The capital of France is", GREEDY)
    assert one["text"].startswith(" Paris")
    assert len(one["output_ids"]) == 5
    assert one["meta_info"]["finish_reason"] == {"type": "length", "length": 5}
    assert one["meta_info"]["prompt_tokens"] == 5
    several = engine.generate(["One, two,", "The capital of France is"], [{**GREEDY, "max_new_tokens": 2}, GREEDY])
    assert several[1]["text"] == one["text"] and len(several[0]["output_ids"]) == 2
    ids = engine.tokenizer.encode("The capital of France is")
    assert engine.generate(input_ids=ids, sampling_params=GREEDY)["text"] == one["text"]
    assert engine.generate(input_ids=[ids, ids], sampling_params=GREEDY)[1]["text"] == one["text"]
    assert engine.generate([], GREEDY) == []
    assert len(engine.generate("One", {**GREEDY, "temperature": 1.0, "n": 3})) == 3


def test_logprobs_come_where_they_are_asked_for(toy: sgl.Engine) -> None:
    answer = toy.generate("One, two,", GREEDY, return_logprob=True, logprob_start_len=0, top_logprobs_num=2)
    meta = answer["meta_info"]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    assert meta["input_token_logprobs"][0][0] is None and len(meta["output_top_logprobs"][0]) == 2


def test_a_stream_gives_answers_so_far(toy: sgl.Engine) -> None:
    whole = toy.generate("One, two,", GREEDY)
    chunks = list(toy.generate("One, two,", GREEDY, stream=True))
    assert chunks[-1]["text"] == whole["text"] and len(chunks) > 1
    assert {chunk["index"] for chunk in toy.generate(["a", "b"], GREEDY, stream=True)} == {0, 1}
    left = toy.generate("One", {**GREEDY, "max_new_tokens": 4000, "ignore_eos": True}, stream=True)
    next(left)
    left.close()
    assert toy.generate("One, two,", GREEDY)["text"] == whole["text"]
    with pytest.raises(InvalidRequestError, match="temperature"):
        next(toy.generate("One", {"temperature": -1}, stream=True))


def test_coroutines_on_a_loop_of_their_own(toy: sgl.Engine) -> None:
    async def both() -> list[object]:
        whole, stream = await asyncio.gather(
            toy.async_generate("One, two,", GREEDY), toy.async_generate("One, two,", GREEDY, stream=True)
        )
        last = [chunk async for chunk in stream][-1]
        scores = await toy.async_score("Is it? ", ["yes"], [100, 200], apply_softmax=True)
        return [whole["text"], last["text"], round(sum(scores[0]), 6)]

    text, streamed, total = asyncio.run(both())
    assert text == streamed == toy.generate("One, two,", GREEDY)["text"] and total == 1.0


def test_more_prompts_than_a_server_would_take(toy: sgl.Engine) -> None:
    answers = toy.generate([f"{number}" for number in range(1500)], {"temperature": 0, "max_new_tokens": 1})
    assert len(answers) == 1500 and all(len(answer["output_ids"]) == 1 for answer in answers)


def test_scores_are_of_each_item(toy: sgl.Engine) -> None:
    scores = toy.score("Is it true? ", ["yes", "no"], [100, 200])
    assert [len(row) for row in scores] == [2, 2] and all(0 <= value <= 1 for row in scores for value in row)


def test_the_cache_is_emptied(toy: sgl.Engine) -> None:
    text = "A text that is long enough to fill a page or two of the cache, and then some more words."
    toy.generate(text, GREEDY)
    assert toy.generate(text, GREEDY)["meta_info"]["cached_tokens"] > 0
    assert toy.flush_cache() is True
    assert toy.generate(text, GREEDY)["meta_info"]["cached_tokens"] == 0


def test_what_is_not_there_is_refused_by_name(toy: sgl.Engine) -> None:
    with pytest.raises(UnavailableError, match="embeddings"):
        toy.encode("x")
    for options in ({"image_data": "a.png"}, {"lora_path": "a"}, {"return_hidden_states": True}):
        with pytest.raises(InvalidRequestError, match=next(iter(options))):
            toy.generate("x", GREEDY, **options)
    with pytest.raises(InvalidRequestError, match="prefil"):
        toy.generate("x", GREEDY, prefil=True)
    with pytest.raises(InvalidRequestError, match="text"):
        toy.generate(sampling_params=GREEDY)


def test_arguments_are_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'mem_fraction_static'"):
        sgl.Engine(mem_fraction=0.5)
    with pytest.raises(ConfigError, match="quantization is not available"):
        sgl.Engine(quantization="awq")
    with pytest.raises(ConfigError, match="mem_fraction_static"):
        sgl.Engine(mem_fraction_static=3)
    with pytest.raises(ConfigError, match=r"no config\.json"):  # and not the arguments that ask for nothing
        sgl.Engine(str(tmp_path), log_level="error", quantization=None, trust_remote_code=True)


def test_nothing_is_left_of_an_engine(toy: sgl.Engine) -> None:
    before = set(threading.enumerate())
    arguments = {"load_format": "dummy", "device": "cpu", "dtype": "float32", "max_total_tokens": 1024}
    with sgl.Engine(toy.config.model.model_path, **arguments) as engine:
        assert len(set(threading.enumerate()) - before) == 2
        engine.generate(["One", "Two"], GREEDY)
        unfinished = engine.generate("One", {**GREEDY, "max_new_tokens": 900, "ignore_eos": True}, stream=True)
        next(unfinished)
    assert set(threading.enumerate()) <= before
    with pytest.raises(EngineError):
        list(unfinished)
    with pytest.raises(EngineError, match="shut down"):
        engine.generate("One")
    engine.shutdown()


def test_a_script_without_ray_ends_by_itself(toy: sgl.Engine, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, sgray as sgl\n"
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules)\n"
        f"engine = sgl.Engine({toy.config.model.model_path!r}, load_format='dummy', max_total_tokens=512)\n"
        "print(len(engine.generate('One', {'max_new_tokens': 2, 'temperature': 0})['output_ids']))\n"
        "assert 'ray' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)], capture_output=True, text=True, env=environment, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
