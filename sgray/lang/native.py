"""Programs on sgray itself: prompts, generations and scores as calls in the native form, by whatever way they travel.

The server renders messages, by the model's own template, so a program's conversation is token for token what a chat
call would send. Knows nothing of HTTP, Ray or engines: those are `Transport`s.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, Protocol

from sgray.errors import SgrayError
from sgray.lang.backend import ChoiceScores, Completion, LoopThread, OnText
from sgray.lang.chat_template import ChatTemplate
from sgray.lang.choice_tree import ChoiceTree
from sgray.lang.choices import Entry
from sgray.lang.errors import EndpointError
from sgray.lang.expressions import Sampling
from sgray.lang.transcript import Prompt, Turn, common_length
from sgray.protocol import MAX_LOGPROB_IDS

Body = Mapping[str, Any]
_CALL_FIELDS = ("return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs")
_CUT = "sgray-cut-here"
_PREFETCH_PRIORITY = -1  # after everybody who waits for an answer
_MAX_ENDED = 4096  # programs in a call


class Transport(Protocol):
    """Carries calls to sgray. Every method is for the loop of the backend; errors are SgrayErrors."""

    async def call(self, name: str, body: Body) -> Any:
        """The answer of `generate`, `tokenize` or `detokenize`."""
        ...

    def stream(self, body: Body) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a streamed `generate`; closing the iterator aborts it."""
        ...

    async def abort(self, name: str) -> None:
        """Stop the calls of this name (`rid`)."""
        ...

    async def end_programs(self, programs: Sequence[str]) -> None:
        """These programs have ended."""
        ...

    async def flush(self) -> bool:
        """Empty the prefix cache."""
        ...

    async def server_info(self) -> dict[str, Any]:
        """Facts about the server."""
        ...


class NativeBackend:
    """A backend over a transport. With a `chat_template` messages are rendered by it and not by the server."""

    def __init__(self, transport: Transport, loop: LoopThread, chat_template: ChatTemplate | None = None) -> None:
        self.transport = transport
        self.loop = loop
        self.chat_template = chat_template
        self._ended: list[str] = []
        self._telling: asyncio.Task[None] | None = None

    @property
    def backend(self) -> NativeBackend:
        """Itself."""
        return self

    async def complete(
        self, prompt: Prompt, sampling: Sampling, on_text: OnText | None, program: str = ""
    ) -> Completion:
        """See Backend."""
        given = sampling.given()
        body = {name: given.pop(name) for name in _CALL_FIELDS if name in given} | _part_of(program)
        if self.chat_template is not None and not prompt.is_text:
            given["stop"] = self.chat_template.with_stops(given.get("stop"))
        body |= await self._input(prompt) | {"sampling_params": _listed(given)}
        if on_text is not None:
            return await self._streamed(body, on_text)
        answer = await self.transport.call("generate", body)
        return _completion(answer if isinstance(answer, list) else [answer])

    async def score_choices(
        self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool, program: str = ""
    ) -> ChoiceScores:
        """See Backend.

        All choices are scored from the first token at which one of them leaves the prompt: where a choice's beginning
        merges with the prompt's last token, the merged token counts.
        """
        text, is_special = await self._text(prompt)
        prompts, start = await self._choice_ids(text, choices, is_special)
        if start == 0:  # nothing before the choices: a first token has no logprob, so something neutral stands there
            prompts, start = await self._choice_ids("\n" + text, choices, is_special)
        start = max(1, start)
        after = self._scores(prompts, start, program)
        if not unconditional:
            return ChoiceScores(await after)
        alone = self._input_logprobs([ids[start:] for ids in prompts], 0, "")
        return ChoiceScores(*await asyncio.gather(after, alone))

    async def prefetch(self, prompt: Prompt, program: str) -> None:
        """See Backend. The prompt's last whole page ends before its last token, so no guess at what follows is kept."""
        body = {"sampling_params": {"max_new_tokens": 0, "temperature": 0.0}, "priority": _PREFETCH_PRIORITY}
        await self.transport.call("generate", body | await self._input(prompt) | _part_of(program))

    def end_program(self, program: str) -> None:
        """See Backend. Those that end while a call tells of others are told together in the next one."""
        self._ended.append(program)
        self.loop.tell(self._begin_telling)

    async def render(self, prompt: Prompt) -> str:
        """See Backend."""
        return (await self._text(prompt))[0]

    async def flush(self) -> bool:
        """See Backend."""
        return await self.transport.flush()

    async def server_info(self) -> dict[str, Any]:
        """See Backend."""
        return await self.transport.server_info()

    def close(self) -> None:
        """See Backend."""
        self.loop.close()

    def _begin_telling(self) -> None:
        if self._telling is None or self._telling.done():
            self._telling = asyncio.get_running_loop().create_task(self._tell_ended())

    async def _tell_ended(self) -> None:
        """A server that does not know of programs, or cannot be reached, has nothing to let go of."""
        while self._ended:
            ended, self._ended = self._ended[:_MAX_ENDED], self._ended[_MAX_ENDED:]
            with suppress(SgrayError):
                await self.transport.end_programs(ended)

    async def _streamed(self, body: Body, on_text: OnText) -> Completion:
        last: dict[int, dict[str, Any]] = {}
        sent = 0
        async with aclosing(self.transport.stream({**body, "stream": True})) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                last[chunk.get("index", 0)] = chunk
                if chunk.get("index", 0) == 0 and len(chunk["text"]) > sent:
                    on_text(chunk["text"][sent:])
                    sent = len(chunk["text"])
        if not last:
            raise EndpointError("the answer has no chunks")
        return _completion([last[index] for index in sorted(last)])

    async def _input(self, prompt: Prompt) -> dict[str, Any]:
        """The prompt as a field of a call."""
        if self.chat_template is None and prompt.is_chat and _is_plain(prompt):
            return {"input_ids": await self._chat_ids(prompt.turns)}
        text, is_special = await self._text(prompt)
        if is_special:
            return {"text": text}
        return {"input_ids": (await self._tokenize(text, is_special=False))["tokens"]}

    async def _text(self, prompt: Prompt) -> tuple[str, bool]:
        """The prompt as text, and whether the tokenizer is to add what it adds to texts: a template writes that."""
        if self.chat_template is not None:
            return self.chat_template.render(prompt), True
        if prompt.is_text:
            return prompt.text, True
        text = before = ""
        turns: list[Turn] = []
        for part in prompt.parts:
            if isinstance(part, Turn):
                turns.append(part)
                continue
            if turns:
                rendered = await self._chat_text(turns)
                text, before = text + _beyond(rendered, before), rendered
            text += part
        text += _beyond(await self._chat_text(turns), before)
        return text, not isinstance(prompt.parts[0], Turn)

    async def _chat_text(self, turns: Sequence[Turn]) -> str:
        last = turns[-1]
        if last.is_open and last.role != "assistant":  # templates leave only the assistant's message open
            marked = [*turns[:-1], Turn(last.role, last.content + _CUT, is_open=False)]
            return (await self._decode(await self._chat_ids(marked))).rpartition(_CUT)[0]
        return await self._decode(await self._chat_ids(turns))

    async def _chat_ids(self, turns: Sequence[Turn]) -> list[int]:
        last = turns[-1]
        is_new, is_continued = last.is_open and not last.content, last.is_open and bool(last.content)
        told = turns[:-1] if is_new else turns
        body = {
            "messages": [{"role": turn.role, "content": turn.content} for turn in told],
            "add_generation_prompt": is_new,
            "continue_final_message": is_continued,
        }
        ids: list[int] = (await self.transport.call("tokenize", body))["tokens"]
        return ids

    async def _decode(self, tokens: list[int]) -> str:
        answer = await self.transport.call("detokenize", {"tokens": tokens, "skip_special_tokens": False})
        return str(answer["text"])

    async def _tokenize(self, prompt: str | list[str], *, is_special: bool) -> dict[str, Any]:
        answer: dict[str, Any] = await self.transport.call(
            "tokenize", {"prompt": prompt, "add_special_tokens": is_special}
        )
        return answer

    async def _choice_ids(self, text: str, choices: Sequence[str], is_special: bool) -> tuple[list[list[int]], int]:
        """The ids of the text with each choice, and how many of the text's own all of them begin with."""
        answer = await self._tokenize([text, *(text + choice for choice in choices)], is_special=is_special)
        own, *prompts = answer["tokens"]
        return prompts, min(common_length(own, ids) for ids in prompts)

    async def _scores(self, prompts: list[list[int]], start: int, program: str) -> list[list[Entry]]:
        """The entries of each prompt's tokens from `start` on, before which all prompts are equal; in one call."""
        tree, shared = ChoiceTree([ids[start:] for ids in prompts]), prompts[0][:start]
        if any(len(path.ids) > MAX_LOGPROB_IDS for path in tree.paths):
            return await self._input_logprobs(prompts, start, program)
        body = {
            "input_ids": [[*shared, *path.tokens] for path in tree.paths],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": start,
            "token_ids_logprob": [path.ids for path in tree.paths],
        } | _part_of(program)
        answers = [answer["meta_info"] for answer in await self.transport.call("generate", body)]
        return tree.entries(
            [[*meta["input_token_ids_logprobs"], meta["output_token_ids_logprobs"][0]] for meta in answers]
        )

    async def _input_logprobs(self, prompts: list[list[int]], start: int, program: str) -> list[list[Entry]]:
        body = {
            "input_ids": prompts,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": start,
        } | _part_of(program)
        answers = await self.transport.call("generate", body)
        return [answer["meta_info"]["input_token_logprobs"] for answer in answers]


def _is_plain(prompt: Prompt) -> bool:
    """Whether a chat call can send these messages."""
    last = prompt.turns[-1]
    return not last.is_open or last.role == "assistant"


def _listed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Tuples as lists, as JSON has them."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}


def _completion(answers: Sequence[Mapping[str, Any]]) -> Completion:
    return Completion([answer["text"] for answer in answers], [answer["meta_info"] for answer in answers])


def _beyond(text: str, before: str) -> str:
    """What `text` has that `before`, rendered from fewer messages, did not have."""
    return text[common_length(text, before) :]


def _part_of(program: str) -> dict[str, Any]:
    return {"program_id": program} if program else {}
