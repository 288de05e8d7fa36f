"""sgray: an LLM inference engine with a radix-tree prefix cache that runs as a Ray Serve application.

`import sgray as sgl` also gives the language of programs; its names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgray.lang.choices import greedy_token_selection as greedy_token_selection
    from sgray.lang.choices import token_length_normalized as token_length_normalized
    from sgray.lang.choices import unconditional_likelihood_normalized as unconditional_likelihood_normalized
    from sgray.lang.defaults import flush_cache as flush_cache
    from sgray.lang.defaults import get_server_info as get_server_info
    from sgray.lang.defaults import global_config as global_config
    from sgray.lang.defaults import set_default_backend as set_default_backend
    from sgray.lang.endpoint import RuntimeEndpoint as RuntimeEndpoint
    from sgray.lang.engine import Engine as Engine
    from sgray.lang.handle import ServeHandle as ServeHandle
    from sgray.lang.openai import OpenAI as OpenAI
    from sgray.lang.primitives import assistant as assistant
    from sgray.lang.primitives import assistant_begin as assistant_begin
    from sgray.lang.primitives import assistant_end as assistant_end
    from sgray.lang.primitives import gen as gen
    from sgray.lang.primitives import gen_int as gen_int
    from sgray.lang.primitives import gen_string as gen_string
    from sgray.lang.primitives import image as image
    from sgray.lang.primitives import select as select
    from sgray.lang.primitives import separate_reasoning as separate_reasoning
    from sgray.lang.primitives import system as system
    from sgray.lang.primitives import system_begin as system_begin
    from sgray.lang.primitives import system_end as system_end
    from sgray.lang.primitives import user as user
    from sgray.lang.primitives import user_begin as user_begin
    from sgray.lang.primitives import user_end as user_end
    from sgray.lang.primitives import video as video
    from sgray.lang.program import batch_infer as batch_infer
    from sgray.lang.program import function as function
    from sgray.lang.runtime import Runtime as Runtime
    from sgray.lang.state import ProgramState as ProgramState

__version__ = "0.1.0"

_HOMES: Mapping[str, str] = MappingProxyType(
    {
        "batch_infer": "program",
        "Engine": "engine",
        "flush_cache": "defaults",
        "function": "program",
        "get_server_info": "defaults",
        "global_config": "defaults",
        "greedy_token_selection": "choices",
        "OpenAI": "openai",
        "ProgramState": "state",
        "Runtime": "runtime",
        "RuntimeEndpoint": "endpoint",
        "ServeHandle": "handle",
        "set_default_backend": "defaults",
        "token_length_normalized": "choices",
        "unconditional_likelihood_normalized": "choices",
        **{f"{role}{end}": "primitives" for role in ("system", "user", "assistant") for end in ("", "_begin", "_end")},
        **dict.fromkeys(
            ("gen", "gen_int", "gen_string", "image", "select", "separate_reasoning", "video"), "primitives"
        ),
    }
)
_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "Anthropic": "use sgray.OpenAI with an endpoint of OpenAI's form",
        "Crusoe": "use sgray.OpenAI with an endpoint of OpenAI's form",
        "LiteLLM": "use sgray.OpenAI with an endpoint of OpenAI's form",
        "VertexAI": "use sgray.OpenAI with an endpoint of OpenAI's form",
        "ServerArgs": "give the arguments to sgray.Engine or sgray.Runtime",
    }
)

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604 - strings all the same


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"sgray.lang.{_HOMES[name]}"), name)
    if name in _ELSEWHERE:
        raise AttributeError(f"sgray has no {name}: {_ELSEWHERE[name]}")
    raise AttributeError(f"module 'sgray' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
