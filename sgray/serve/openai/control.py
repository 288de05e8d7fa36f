"""What is asked of a server beside calls: its facts, proof that it works, to empty the cache, which call to stop.

Paths and shapes are SGLang's. Nothing here is secret: keys, and where they are kept, are left out of the facts.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import asdict

import sgray
from sgray.config import Config
from sgray.errors import InvalidRequestError, OverloadedError, SgrayError
from sgray.protocol import Request, SamplingParams
from sgray.serve.openai.backend import Backend
from sgray.serve.openai.forms import Json
from sgray.serve.openai.generation import within
from sgray.serve.openai.schemas import AbortBody, EndProgramsBody
from sgray.serve.openai.validate import checked_text, parse_body, shown, wrong_value

PROBE_S = 10.0
_PROBE_PRIORITY = 2**31 - 1
_FLUSH_AGAIN_S = 0.1
_MAX_FLUSH_S = 600.0
_KEY_LEAVES = {"api_keys_file", "admin_keys_file"}


class Control:
    """Facts and switches of a server over a backend."""

    def __init__(self, config: Config, backend: Backend) -> None:
        self._config = config
        self._backend = backend

    def model_info(self) -> Json:
        """Which model is served; raises OverloadedError before a replica was seen."""
        return self._model() | {
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "architectures": [self._backend.info.architecture],
        }

    def server_info(self) -> Json:
        """The version, the model, the configuration, and the load of each replica in `internal_states`."""
        info = self._backend.info
        return self._model() | {
            "version": sgray.__version__,
            "served_model_name": self._config.model_name,
            "architecture": info.architecture,
            "dtype": info.dtype,
            "device": info.device,
            "vocab_size": info.vocab_size,
            "context_length": info.context_length,
            "page_size": info.page_size,
            "max_total_num_tokens": info.num_pages * info.page_size,
            "max_running_requests": info.max_running_requests,
            "config": self._config.model_dump(mode="json", exclude={"api": _KEY_LEAVES}),
            "internal_states": [
                {"replica": name} | asdict(load) for name, load in sorted(self._backend.loads().items())
            ],
        }

    async def check_generation(self) -> None:
        """Let a replica draw one token, ahead of what waits; raises OverloadedError where none does so in time."""
        try:
            await within(PROBE_S, self._draw_one())
        except TimeoutError:
            raise OverloadedError(f"No replica has drawn a token in {PROBE_S:g} s.") from None
        except OverloadedError:
            raise
        except SgrayError as error:
            raise OverloadedError(f"A replica could not draw a token: {error.message}") from None

    async def _draw_one(self) -> None:
        sampling = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        probe = Request(f"health-{uuid.uuid4().hex}", [0], sampling, _PROBE_PRIORITY)
        stream = self._backend.submit(probe)
        try:
            async for delta in stream:
                if delta.tokens:
                    return
                if delta.finish is not None:
                    raise OverloadedError(f"A replica could not draw a token: {delta.finish.reason}.")
        finally:
            await stream.aclose()

    async def flush(self, timeout_s: float) -> None:
        """Empty the prefix cache of all replicas; raises InvalidRequestError where requests hold one for so long."""
        deadline = time.monotonic() + timeout_s
        while (held := await self._backend.flush()) and time.monotonic() < deadline:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(_FLUSH_AGAIN_S)
        if held:
            raise InvalidRequestError(
                f"The cache was not flushed: requests wait or run at {', '.join(sorted(held))}. "
                "Try again when they are done, or give a timeout in seconds to wait for that.",
                code="cache_in_use",
            )

    def _model(self) -> Json:
        model = self._config.model
        return {"model_path": model.model_path, "tokenizer_path": model.tokenizer_path or model.model_path}


def abort_name(body: object) -> str | None:
    """The name of the calls to stop; None for all."""
    given = parse_body(AbortBody, body)
    if given.abort_all:
        return None
    if not given.rid:
        raise InvalidRequestError("Give 'rid', the name of a call, or set abort_all.", param="rid")
    return checked_text("rid", "rid", given.rid)


def ended_programs(body: object) -> list[str]:
    """The programs that have ended."""
    given = parse_body(EndProgramsBody, body).program_ids
    return [checked_text("program_ids", f"program_ids[{index}]", name) for index, name in enumerate(given)]


def flush_timeout(value: str | None) -> float:
    """Seconds from the query of a flush; none is 0, which asks once."""
    if value is None:
        return 0.0
    try:
        seconds = float(value)
    except ValueError:
        wrong_value("timeout", "timeout", f"{shown(value)} is not a number of seconds.")
    if not 0 <= seconds <= _MAX_FLUSH_S:
        wrong_value("timeout", "timeout", f"{shown(value)} is not in 0..{_MAX_FLUSH_S:g} seconds.")
    return seconds
