"""Names of calls inside the ids of the engine's requests, so that whoever knows a call's name can stop it anywhere.

A request is `call-index`, or `name/call-index` where the caller gave the name (SGLang's `rid`). The prompts of a list
are named `name_0`, `name_1`, ..., and so again are several choices of one. A request that goes on at another replica
has an id of its own there, `...~1`, so that what the first still says cannot be taken for an answer of the second.
"""

from __future__ import annotations

import re

_OWN_NUMBER = re.compile(r"-\d+")
_MOVE_NUMBER = re.compile(r"~\d+$")
_GIVEN_NUMBER = re.compile(r"(_\d+)+")


def request_id(call_id: str, index: int, name: str = "") -> str:
    """The id of request `index` of a call. `call_id` is unique and has no slash; `name` is any text."""
    own = f"{call_id}-{index}"
    return f"{name}/{own}" if name else own


def moved_id(request_id: str, number: int) -> str:
    """The id that a request has after it was moved for the `number`th time."""
    return f"{request_id}~{number}"


def is_of_call(request_id: str, name: str) -> bool:
    """Whether `name` means this request: its name, its id, or the name of the call or list that it belongs to."""
    given, slash, own = _MOVE_NUMBER.sub("", request_id).rpartition("/")
    whole, number = (given, _GIVEN_NUMBER) if slash else (own, _OWN_NUMBER)
    if not whole.startswith(name):
        return False
    rest = whole[len(name) :]
    return not rest or number.fullmatch(rest) is not None
