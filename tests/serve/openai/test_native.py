"""The native form, and the calls as Python functions."""

from __future__ import annotations

import pytest

from sgray.config import Config
from sgray.errors import InvalidRequestError, ModelNotFoundError
from sgray.serve.openai.service import OpenAIService

pytestmark = pytest.mark.anyio
PATH = "/generate"


@pytest.fixture
def service(tokenizer, backend) -> OpenAIService:
    return OpenAIService(Config.parse({}), tokenizer, backend)


async def test_a_text_and_its_ids_give_the_same_answer(api, backend):
    backend.cached_tokens = 1
    for prompt in ({"text": "Hello world"}, {"text": ..., "input_ids": [19556, 905]}):
        answer = await api.answer(PATH, **prompt)
        identity = answer["meta_info"].pop("id")
        assert identity
        assert answer == {
            "text": ", a world,",
            "output_ids": [28, 253, 905, 28],
            "meta_info": {
                "finish_reason": {"type": "length", "length": 4},
                "prompt_tokens": 2,
                "completion_tokens": 4,
                "cached_tokens": 1,
            },
        }


async def test_lists_of_prompts_and_several_choices_give_lists(api):
    assert len(await api.answer(PATH, text=["Hello", "Hello world"])) == 2
    assert len(await api.answer(PATH, text=..., input_ids=[[1], [2, 3]])) == 2
    assert len(await api.answer(PATH, sampling_params={"n": 3})) == 3


async def test_finish_reasons_name_what_matched(api):
    cases = [({"stop": "a w"}, "a w"), ({"stop_token_ids": [905]}, 905), ({"logit_bias": {"2": 100}}, 2)]
    for sampling, matched in cases:
        answer = await api.answer(PATH, sampling_params=sampling)
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}


async def test_streamed_chunks_carry_everything_so_far(api):
    whole = await api.answer(PATH)
    events = await api.events(PATH)
    assert [event["text"] for event in events] == [",", ", a", ", a world", ", a world,"]
    assert events[-1]["output_ids"] == whole["output_ids"]
    assert events[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    assert events[0]["meta_info"]["finish_reason"] is None


async def test_logprobs_of_the_native_form(api):
    meta = (await api.answer(PATH, return_logprob=True, top_logprobs_num=2))["meta_info"]
    assert meta["output_token_logprobs"][0] == [-0.25, 28, ","]
    assert meta["output_top_logprobs"][0] == [[-0.25, 28, ","], [-1.5, 29, "-"]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": ..., "input_ids": []}, "input_ids"),
        ({"text": ..., "input_ids": [[]]}, "input_ids"),
        ({"text": ..., "input_ids": [-1]}, "input_ids"),
        ({"text": ..., "input_ids": [49152]}, "input_ids"),
        ({"text": ""}, "text"),
        ({"text": []}, "text"),
        ({"text": ...}, "text"),
        ({"input_ids": [1]}, "text"),
        ({"top_logprobs_num": 50000}, "top_logprobs_num"),
        ({"sampling_params": {"n": 0}}, "sampling_params.n"),
        ({"sampling_params": {"n": 1000}}, "sampling_params.n"),
        ({"sampling_params": {"temperature": float("nan")}}, "sampling_params.temperature"),
        ({"sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"sampling_params": {"min_new_tokens": 500}}, "sampling_params.min_new_tokens"),
        ({"sampling_params": {"max_tokens": 4}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"logit_bias": {"x": 1}}}, "sampling_params.logit_bias"),
        ({"sampling_params": {"stop": [""]}}, "sampling_params.stop"),
        ({"sampling_params": []}, "sampling_params"),
        ({"lora_path": "x"}, "lora_path"),
    ],
)
async def test_pub_067_and_pub_054_wrong_native_fields_are_named(api, fields, param):
    assert (await api.refused(PATH, **fields))["param"] == param
    assert (await api.post(PATH)).status_code == 200


async def test_the_service_answers_like_the_routes(service, api):
    for path, call in (("/v1/chat/completions", service.chat), ("/v1/completions", service.completions)):
        whole, routed = await call(api.body(path)), await api.answer(path)
        assert whole["choices"] == routed["choices"]
        chunks = [chunk async for chunk in await call(api.body(path, stream=True))]
        assert [chunk["choices"] for chunk in chunks] == [event["choices"] for event in await api.events(path)]
    assert (await service.generate(api.body(PATH)))["text"] == (await api.answer(PATH))["text"]
    assert len([chunk async for chunk in await service.generate(api.body(PATH, stream=True))]) == 4


async def test_python_callers_may_use_integer_keys(service, api, backend):
    await service.chat(api.body("/v1/chat/completions", logit_bias={7: 1}))
    assert backend.requests[0].sampling.logit_bias == {7: 1.0}


async def test_the_service_raises_typed_errors_before_anything_runs(service, api, backend):
    with pytest.raises(ModelNotFoundError):
        await service.chat(api.body("/v1/chat/completions", model="x"))
    with pytest.raises(InvalidRequestError):
        await service.completions([])
    assert not backend.requests


async def test_leaving_a_stream_of_the_service_aborts_it(service, api, backend):
    chunks = await service.chat(api.body("/v1/chat/completions", stream=True, max_tokens=1000, n=2))
    async for _ in chunks:
        break
    await chunks.aclose()
    assert not backend.running
    assert len(backend.aborted) >= 1
