"""The native form, and the calls as Python functions."""

from __future__ import annotations

import pytest

from sgray.config import Config
from sgray.errors import InvalidRequestError, ModelNotFoundError
from sgray.protocol import Finish
from sgray.serve.call_names import is_of_call
from sgray.serve.openai.schemas import NATIVE_SAMPLING_UNSUPPORTED, NATIVE_UNSUPPORTED
from sgray.serve.openai.service import OpenAIService

pytestmark = pytest.mark.anyio
PATH = "/generate"
THIRD = "<repo_name>"


@pytest.fixture
def service(tokenizer, backend) -> OpenAIService:
    return OpenAIService(Config.parse({}), tokenizer, backend)


async def test_a_text_and_its_ids_give_the_same_answer(api, backend):
    backend.cached_tokens = 1
    for prompt in ({"text": "Hello world"}, {"text": ..., "input_ids": [19556, 905]}):
        answer = await api.answer(PATH, **prompt)
        identity = answer["meta_info"].pop("id")
        assert identity
        assert 0 <= answer["meta_info"].pop("e2e_latency") < 60
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
    assert ["e2e_latency" in event["meta_info"] for event in events] == [False, False, False, True]


async def test_logprobs_of_the_native_form(api):
    meta = (await api.answer(PATH, return_logprob=True))["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.25, token, None] for token in (28, 253, 905, 28)]
    assert meta["input_token_logprobs"] == []
    assert not {"input_top_logprobs", "output_top_logprobs"} & set(meta)
    meta = (await api.answer(PATH, return_logprob=True, top_logprobs_num=2, return_text_in_logprobs=True))["meta_info"]
    assert meta["output_token_logprobs"][0] == [-0.25, 28, ","]
    assert meta["output_top_logprobs"][0] == [[-0.25, 28, ","], [-1.5, 29, "-"]]
    assert meta["input_top_logprobs"] == []
    assert "output_token_logprobs" not in (await api.answer(PATH, top_logprobs_num=2))["meta_info"]


@pytest.mark.parametrize("count", [0, 4])
async def test_logprobs_of_the_prompt_begin_where_asked(api, backend, count):
    fields = {"return_logprob": True, "return_text_in_logprobs": True, "sampling_params": {"max_new_tokens": count}}
    ids = [19556, 905, 30, 28]
    entries = [[None, 19556, "Hello"], [-0.25, 905, " world"], [-0.25, 30, "."], [-0.25, 28, ","]]
    for start in range(5):
        meta = (await api.answer(PATH, text=..., input_ids=ids, logprob_start_len=start, **fields))["meta_info"]
        assert meta["input_token_logprobs"] == entries[start:]
        assert meta["prompt_tokens"] == start + len(meta["input_token_logprobs"])
        assert (meta["completion_tokens"], len(meta["output_token_logprobs"])) == (count, count)
    asked = [request.sampling for request in backend.requests]
    assert [one.prompt_logprobs_start for one in asked if one.prompt_logprobs == 0] == [0, 1, 2, 3]


async def test_top_logprobs_of_the_prompt_have_none_for_its_first_token(api):
    fields = {"return_logprob": True, "top_logprobs_num": 1}
    meta = (await api.answer(PATH, logprob_start_len=0, **fields))["meta_info"]
    assert meta["input_top_logprobs"] == [None, [[-0.25, 905, None]]]
    meta = (await api.answer(PATH, logprob_start_len=1, **fields))["meta_info"]
    assert meta["input_top_logprobs"] == [[[-0.25, 905, None]]]


async def test_logprobs_of_chosen_ids_come_with_those_of_each_token(api, backend):
    fields = {"return_logprob": True, "logprob_start_len": 0, "return_text_in_logprobs": True}
    meta = (await api.answer(PATH, token_ids_logprob=[28, 3, 3], **fields))["meta_info"]
    row = [[-28.0, 28, ","], [-3.0, 3, THIRD], [-3.0, 3, THIRD]]
    assert meta["input_token_ids_logprobs"] == [None, row]
    assert meta["output_token_ids_logprobs"] == [row] * 4
    assert (await api.events(PATH, token_ids_logprob=[28, 3, 3], **fields))[-1]["meta_info"][
        "output_token_ids_logprobs"
    ] == [row] * 4
    two = {"text": ["Hello", "Hi"], "return_logprob": True}
    answers = await api.answer(PATH, token_ids_logprob=[[5], None], **two)
    assert answers[0]["meta_info"]["output_token_ids_logprobs"] == [[[-5.0, 5, None]]] * 4
    assert "output_token_ids_logprobs" not in answers[1]["meta_info"]
    answers = await api.answer(PATH, token_ids_logprob=[5], **two)
    assert all(len(answer["meta_info"]["output_token_ids_logprobs"]) == 4 for answer in answers)
    meta = (await api.answer(PATH, token_ids_logprob=[5]))["meta_info"]
    assert not [name for name in meta if "logprob" in name] and backend.requests[-1].sampling.logprob_ids == ()


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ([49152], "token_ids_logprob[0]"),
        ([1, -1], "token_ids_logprob[1]"),
        ([True], "token_ids_logprob[0]"),
        ("1", "token_ids_logprob"),
        ([[1]], "token_ids_logprob[0]"),
        ([1] * 513, "token_ids_logprob"),
    ],
)
async def test_bad_ids_are_refused_where_they_stand(api, value, place):
    error = await api.refused(PATH, token_ids_logprob=value)
    assert error["param"] == "token_ids_logprob" and f"'{place}'" in error["message"], error


async def test_streamed_logprobs_grow_to_the_whole(api):
    fields = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
    whole = (await api.answer(PATH, **fields))["meta_info"]
    events = await api.events(PATH, **fields)
    assert [len(event["meta_info"]["output_token_logprobs"]) for event in events] == [1, 2, 3, 4]
    assert all(event["meta_info"]["input_token_logprobs"] == whole["input_token_logprobs"] for event in events)
    for name in ("output_token_logprobs", "output_top_logprobs"):
        assert events[-1]["meta_info"][name] == whole[name]


async def test_a_chunk_that_is_kept_does_not_grow(service, api):
    chunks = [chunk async for chunk in await service.generate(api.body(PATH, stream=True, return_logprob=True))]
    assert [len(chunk["output_ids"]) for chunk in chunks] == [1, 2, 3, 4]
    assert [len(chunk["meta_info"]["output_token_logprobs"]) for chunk in chunks] == [1, 2, 3, 4]


async def test_each_prompt_of_a_list_has_its_own_values(api, backend):
    answers = await api.answer(
        PATH,
        text=["Hello world", "Hello"],
        sampling_params=[{"max_new_tokens": 2, "stop": "a"}, {"max_new_tokens": 3, "sampling_seed": 7}],
        return_logprob=[True, False],
        top_logprobs_num=[1, 2],
        logprob_start_len=[1, -1],
        rid=["left", "right"],
    )
    assert [answer["text"] for answer in answers] == [", ", ", a world"]
    assert [answer["meta_info"]["id"] for answer in answers] == ["left", "right"]
    assert len(answers[0]["meta_info"]["input_top_logprobs"]) == 1
    assert not any("logprob" in name for name in answers[1]["meta_info"])
    left, right = sorted(backend.requests, key=lambda request: request.id)
    assert (left.sampling.prompt_logprobs, right.sampling.prompt_logprobs, right.sampling.logprobs) == (1, -1, -1)
    assert (left.sampling.seed, right.sampling.seed) == (None, 7)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"rid": "job"}, ["job"]),
        ({"rid": "job", "sampling_params": {"n": 2}}, ["job_0", "job_1"]),
        ({"rid": "job", "text": ["Hello"]}, ["job_0"]),
        ({"rid": "job", "text": ["a", "b"], "sampling_params": {"n": 2}}, ["job_0_0", "job_0_1", "job_1_0", "job_1_1"]),
        ({"rid": ["a/b", "c"], "text": ["a", "b"]}, ["a/b", "c"]),
    ],
)
async def test_answers_and_requests_bear_the_callers_names(api, backend, fields, names):
    answers = await api.answer(PATH, **fields)
    answers = answers if isinstance(answers, list) else [answers]
    assert [answer["meta_info"]["id"] for answer in answers] == names
    assert sorted(request.id.rpartition("/")[0] for request in backend.requests) == sorted(names)
    assert all(any(is_of_call(request.id, name) for request in backend.requests) for name in names)
    await api.answer(PATH, **fields)
    assert len({request.id for request in backend.requests}) == 2 * len(names), "the same name may be used again"


async def test_chunks_come_as_often_as_they_were_asked_for(api):
    sampling = {"max_new_tokens": 7, "ignore_eos": True}
    for interval, expected in ((1, [1, 2, 3, 4, 5, 6, 7]), (3, [1, 4, 7]), (4, [1, 5, 7]), (1000, [1, 7])):
        events = await api.events(PATH, sampling_params=sampling | {"stream_interval": interval})
        assert [event["meta_info"]["completion_tokens"] for event in events] == expected
        assert events[-1]["output_ids"] == (await api.events(PATH, sampling_params=sampling))[-1]["output_ids"]
    assert (await api.refused(PATH, sampling_params={"stream_interval": 0}))["param"].endswith("stream_interval")


@pytest.mark.parametrize(
    ("fields", "programs"),
    [
        ({}, [""]),
        ({"program_id": "p"}, ["p"]),
        ({"program_id": "p", "text": ["a", "b"]}, ["p", "p"]),
        ({"program_id": ["p", ""], "text": ["a", "b"], "sampling_params": {"n": 2}}, ["p", "p", "", ""]),
    ],
)
async def test_requests_are_parts_of_the_callers_programs(api, backend, fields, programs):
    await api.answer(PATH, **fields)
    assert [one.program for one in sorted(backend.requests, key=lambda one: one.id)] == programs


async def test_an_answer_of_no_tokens_still_brings_its_prompt_into_the_cache(api, backend):
    answer = await api.answer(PATH, sampling_params={"max_new_tokens": 0})
    assert (answer["text"], answer["output_ids"], answer["meta_info"]["completion_tokens"]) == ("", [], 0)
    assert [request.sampling.max_new_tokens for request in backend.requests] == [1]
    full = {"input_ids": [5] * backend.info.context_length, "sampling_params": {"max_new_tokens": 0}}
    assert (await api.answer(PATH, text=None, **full))["output_ids"] == []
    assert len(backend.requests) == 1, "where there is no room for a token there is nothing to go on with either"


async def test_an_answer_without_a_name_can_be_stopped_by_its_id(api, backend):
    for fields in ({}, {"sampling_params": {"n": 2}}):
        backend.requests.clear()
        answers = await api.answer(PATH, **fields)
        for answer in answers if isinstance(answers, list) else [answers]:
            assert any(is_of_call(request.id, answer["meta_info"]["id"]) for request in backend.requests)


async def test_an_aborted_call_gives_what_there_is_and_says_so(api, backend):
    backend.fail_after, backend.failure = 2, Finish("abort")
    answer = await api.answer(PATH, return_logprob=True, logprob_start_len=0)
    events = await api.events(PATH, return_logprob=True, logprob_start_len=0)
    for found in (answer, events[-1]):
        assert (found["text"], found["output_ids"]) == (", a", [28, 253])
        assert found["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(found["meta_info"]["output_token_logprobs"]) == len(found["meta_info"]["input_token_logprobs"]) == 2
    backend.fail_after = 0
    answer = await api.answer(PATH, return_logprob=True, logprob_start_len=0, sampling_params={"max_new_tokens": 0})
    assert (answer["output_ids"], answer["meta_info"]["finish_reason"]["type"]) == ([], "abort")
    assert (await api.post("/v1/completions")).status_code == 500, "there an answer that broke off is no answer"


async def test_an_engine_that_leaves_prompt_logprobs_out_is_found_out(api, backend, monkeypatch):
    submit = backend.submit

    async def forgetful(request):
        async for delta in submit(request):
            delta.prompt_logprobs = None
            yield delta

    monkeypatch.setattr(backend, "submit", forgetful)
    response = await api.post(PATH, return_logprob=True, logprob_start_len=0)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_error")


async def test_the_body_of_sglangs_own_load_generator_is_taken(api):
    body = {
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True},
        "lora_path": "",
        "return_logprob": False,
        "logprob_start_len": -1,
        "return_routed_experts": False,
    }
    events = await api.events(PATH, **body)
    assert events[-1]["meta_info"]["completion_tokens"] == 4


async def test_the_body_of_sglangs_programs_is_taken(api):
    names = ("stop_token_ids", "stop_regex", "regex", "json_schema", "sampling_seed", "logit_bias", "custom_params")
    sampling = {"max_new_tokens": 4, "min_new_tokens": 0, "n": 1, "stop": [], "top_k": -1} | dict.fromkeys(names)
    fields = {"return_logprob": None, "top_logprobs_num": None, "logprob_start_len": None, "image_data": None}
    assert (await api.answer(PATH, sampling_params=sampling, **fields))["text"] == ", a world,"


@pytest.mark.parametrize(
    ("table", "place"), [(NATIVE_UNSUPPORTED, ""), (NATIVE_SAMPLING_UNSUPPORTED, "sampling_params.")]
)
async def test_fields_of_sglang_that_cannot_be_honoured_are_refused_unless_they_ask_for_nothing(api, table, place):
    for name, (harmless, _) in table.items():
        for value in (*harmless, None, {"some": "thing"}):
            body = {name: value} if not place else {"sampling_params": {name: value, "max_new_tokens": 1}}
            if value == {"some": "thing"}:
                assert (await api.refused(PATH, **body))["param"] == f"{place}{name}"
            else:
                assert await api.answer(PATH, **body)


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
        ({"sampling_params": [{}]}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{}, 1]}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"top_p": 2}]}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"regex": "x("}]}, "sampling_params[1].regex"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params"),
        ({"return_logprob": "yes"}, "return_logprob"),
        ({"return_logprob": [True]}, "return_logprob"),
        ({"text": ["a", "b"], "return_logprob": [True, 1]}, "return_logprob"),
        ({"top_logprobs_num": 2.5}, "top_logprobs_num"),
        ({"top_logprobs_num": True}, "top_logprobs_num"),
        ({"top_logprobs_num": -1}, "top_logprobs_num"),
        ({"logprob_start_len": -2}, "logprob_start_len"),
        ({"logprob_start_len": 3}, "logprob_start_len"),
        ({"text": ["Hello world", "Hello"], "logprob_start_len": 2}, "logprob_start_len"),
        ({"rid": ""}, "rid"),
        ({"rid": 5}, "rid"),
        ({"rid": "x" * 257}, "rid"),
        ({"rid": "\ud800"}, "rid"),
        ({"rid": ["a"]}, "rid"),
        ({"text": ["a", "b"], "rid": ["a"]}, "rid"),
        ({"text": ["a", "b"], "rid": ["a", "a"]}, "rid"),
        ({"cache_salt": "\ud800"}, "cache_salt"),
        ({"program_id": 5}, "program_id"),
        ({"program_id": "x" * 257}, "program_id"),
        ({"program_id": "\ud800"}, "program_id"),
        ({"text": ["a", "b"], "program_id": ["a"]}, "program_id"),
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
