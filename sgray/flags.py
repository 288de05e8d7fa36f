"""Command-line flags made from the leaves of the configuration, so that the two cannot drift.

Every leaf is a flag of the same name (`schedule.max_running_requests` is `--max-running-requests`). SGLang's flags that
have no meaning here are accepted and explained; those of features that this version lacks are refused with a reason.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sgray.config import Config, leaves
from sgray.errors import ConfigError

ALIASES: Mapping[str, tuple[str, ...]] = {
    "model.model_path": ("--model",),
    "parallel.tp_size": ("--tp", "--tensor-parallel-size"),
    "parallel.ep_size": ("--ep", "--expert-parallel-size"),
}

NOT_NEEDED: Mapping[str, str] = {
    "--node-rank": "Ray gives each process its rank; start sgray once, on any node of the cluster",
    "--dist-url": "the processes of a replica find each other through Ray",
    "--dist-init-addr": "the processes of a replica find each other through Ray",
    "--enable-trace": "calls are traced where --otlp-traces-endpoint names a collector",
}

NOT_AVAILABLE: Mapping[str, str] = {
    "--quantization": "serve the unquantised checkpoint; --dtype sets the computing type",
    "--speculative": "leave the --speculative flags out; answers are the same without them",
    "--api-key": "command lines can be read by others; set SGRAY_API_KEYS, or name a file with --api-keys-file",
    "--admin-api-key": "command lines can be read by others; set SGRAY_ADMIN_KEY, or use --admin-keys-file",
    "--radix-eviction-policy": "lru is the only policy; leave the flag out",
    "--dp": "use --min-replicas N --max-replicas N for N copies of the model",
    "--data-parallel-size": "use --min-replicas N --max-replicas N for N copies of the model",
    "--lora": "merge the adapter into the checkpoint",
    "--enable-lora": "merge the adapter into the checkpoint",
}


def add_key_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a client of a server with keys; `client_key` reads what they give."""
    keys = parser.add_mutually_exclusive_group()
    text = "file that holds the server's key; without it SGRAY_API_KEY is used, if set"
    keys.add_argument("--key-file", metavar="FILE", help=text)
    keys.add_argument("--api-key", metavar="KEY", help="the key itself, which others on this machine may then read")


def flag_of(leaf: str) -> str:
    """The flag of the leaf `section.name`."""
    return "--" + leaf.split(".")[1].replace("_", "-")


def add_config_flags(parser: argparse.ArgumentParser, *, sections: Iterable[str] | None = None) -> None:
    """Adds one flag for each leaf (of `sections` alone, if given); an unset flag leaves no trace in the namespace."""
    wanted = set(Config.model_fields if sections is None else sections)
    groups = {name: parser.add_argument_group(f"{name} options") for name in Config.model_fields if name in wanted}
    for leaf, section in leaves().items():
        name, field_name = leaf.split(".")
        if name not in wanted:
            continue
        group = groups[name]
        field = section.model_fields[field_name]
        flags = (flag_of(leaf), *ALIASES.get(leaf, ()))
        text = f"{field.description or ''} (default: {field.default})".strip().replace("%", "%%")
        if field.annotation is bool:
            group.add_argument(*flags, dest=leaf, action="store_true", default=argparse.SUPPRESS, help=text)
        else:
            metavar = "|".join(word for word in _type_words(field.annotation) if word != "none")
            group.add_argument(*flags, dest=leaf, metavar=metavar, default=argparse.SUPPRESS, help=text)


def type_of(leaf: str) -> str:
    """The type of a leaf in words that a user reads: `INT | auto`, `cpu | cuda`, `STR | none`."""
    annotation = leaves()[leaf].model_fields[leaf.split(".")[1]].annotation
    return " | ".join(_type_words(annotation))


def config_from(arguments: argparse.Namespace, **defaults: Any) -> Config:
    """The configuration that the flags describe; `defaults` are `section__leaf` values below the flags.

    Raises ConfigError that names the wrong leaf.
    """
    values: dict[str, dict[str, Any]] = {}
    given = {name.replace("__", "."): value for name, value in defaults.items()}
    given.update({name: _typed(name, value) for name, value in vars(arguments).items() if name in leaves()})
    for leaf, value in given.items():
        section, name = leaf.split(".")
        values.setdefault(section, {})[name] = value
    return Config.parse(values)


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Like `parser.parse_args`, with an explanation for flags that mean nothing here, or nothing yet.

    A subcommand's parser makes itself known as `parser` among its defaults. Ends the process with status 2, as argparse
    does, on a flag that is unknown or not available.
    """
    arguments, rest = parser.parse_known_args(argv)
    owner: argparse.ArgumentParser = getattr(arguments, "parser", parser)
    position = 0
    while position < len(rest):
        position = _explain(owner, rest, position)
    return arguments


def _explain(parser: argparse.ArgumentParser, rest: Sequence[str], position: int) -> int:
    """Deals with the unknown word at `position`; returns the position of the next one."""
    flag, has_value, value = rest[position].partition("=")
    if not flag.startswith("-"):
        parser.error(f"unexpected argument {flag!r}")
    following = rest[position + 1] if position + 1 < len(rest) else ""
    width = 1 if has_value or not following or following.startswith("-") else 2
    if reason := NOT_NEEDED.get(flag):
        print(f"{parser.prog}: {flag} is not needed and ignored: {reason}", file=sys.stderr)
        return position + width
    if flag == "--radix-eviction-policy" and (value or following) == "lru":
        return position + width
    if reason := next((text for name, text in NOT_AVAILABLE.items() if _means(flag, name)), None):
        parser.error(f"{flag} is not available in this version; {reason}")
    near = difflib.get_close_matches(flag, parser._option_string_actions, n=1, cutoff=0.0)
    parser.error(f"unknown flag {flag}; the nearest known one is {near[0]} (--help lists all)")


def _typed(leaf: str, value: str | bool) -> str | bool | int | float:
    """A number where the leaf takes one and the text is one; else the text, for the configuration to judge."""
    words = type_of(leaf).split(" | ")
    for word, convert in (("INT", int), ("FLOAT", float)):
        if word in words:
            try:
                return convert(value)
            except ValueError:
                return value
    return value


def _means(flag: str, name: str) -> bool:
    return flag == name or flag.startswith(name + "-")


def _type_words(annotation: Any) -> list[str]:
    if annotation is type(None):
        return ["none"]
    if isinstance(annotation, str):
        return [annotation]
    parts: tuple[Any, ...] = getattr(annotation, "__args__", ())
    if not parts:
        return [annotation.__name__.upper()]
    return [word for part in parts for word in _type_words(part)]


def leaf_named(name: str) -> str:
    """The full `section.leaf` for a leaf given in full or by its last word; raises ConfigError with the nearest one."""
    known = list(leaves())
    matches = [leaf for leaf in known if name in (leaf, leaf.split(".")[1])]
    if matches:
        return matches[0]
    near = difflib.get_close_matches(name, known + [leaf.split(".")[1] for leaf in known], n=1, cutoff=0.0)
    raise ConfigError(f"no configuration leaf is called {name!r}; the nearest one is {near[0]!r}")
