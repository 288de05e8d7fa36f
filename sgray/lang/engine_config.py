"""SGLang's keyword arguments as a configuration. Every leaf is an argument of its own name, without its section."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from sgray.config import Config, leaves
from sgray.errors import ConfigError
from sgray.flags import NOT_AVAILABLE, NOT_NEEDED

ALIASES: Mapping[str, str] = MappingProxyType(
    {"model": "model_path", "tp": "tp_size", "tensor_parallel_size": "tp_size", "tokenizer": "tokenizer_path"}
)
# They say how a server's processes are run, which are not there, or ask for what is done anyway.
NO_MEANING = frozenset(
    {"host", "port", "log_level", "log_requests", "skip_server_warmup", "trust_remote_code", "stream_interval"}
)
_MANY = 2**31 - 1


def engine_config(arguments: Mapping[str, Any]) -> Config:
    """The configuration of an engine in this process.

    Batches and queue have no limit unless one is given: whoever hands in a million prompts wants a million answers.
    Raises ConfigError that names an unknown argument and the nearest known one.
    """
    names = {leaf.split(".")[1]: leaf for leaf in leaves()}
    values: dict[str, dict[str, Any]] = {
        "api": {"max_batch": _MANY, "max_n": _MANY},
        "schedule": {"max_queued_requests": _MANY},
    }
    for given, value in arguments.items():
        name = ALIASES.get(given, given)
        if name in names:
            section, leaf = names[name].split(".")
            values.setdefault(section, {})[leaf] = value
        else:
            _refuse(given, value, names)
    return Config.parse(values)


def server_flags(arguments: Mapping[str, Any]) -> list[str]:
    """The same arguments as flags of the server's command line."""
    engine_config(arguments)
    known = {leaf.split(".")[1] for leaf in leaves()}
    flags: list[str] = []
    for given, value in arguments.items():
        name = ALIASES.get(given, given)
        if name not in known or value is None or value is False:
            continue
        flags.append("--" + name.replace("_", "-"))
        flags += [] if value is True else [str(value)]
    return flags


def _refuse(name: str, value: Any, known: Mapping[str, str]) -> None:
    """Raise for an argument that means something that is not there; one that asks for nothing passes."""
    flag = "--" + name.replace("_", "-")
    if name in NO_MEANING or value is None or value is False or flag in NOT_NEEDED:
        if name not in NO_MEANING and flag not in NOT_NEEDED and not _reason(flag):
            raise _unknown(name, known)
        return
    if reason := _reason(flag):
        raise ConfigError(f"{name} is not available in this version; {reason}", param=name)
    raise _unknown(name, known)


def _reason(flag: str) -> str | None:
    return next((text for word, text in NOT_AVAILABLE.items() if flag == word or flag.startswith(f"{word}-")), None)


def _unknown(name: str, known: Mapping[str, str]) -> ConfigError:
    near = difflib.get_close_matches(name, [*known, *ALIASES], n=1, cutoff=0.0)
    return ConfigError(f"unknown argument {name!r}; the nearest known one is {near[0]!r}", param=name)
