"""The command `sgray`: serve, chat, generate, pull, config, bench.

Light on purpose: torch, transformers and Ray are imported by the command that needs them, when it runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sgray import __version__
from sgray.config import DEFAULT_MODEL, client_key, leaves
from sgray.errors import SgrayError
from sgray.flags import add_config_flags, add_key_flags, config_from, flag_of, leaf_named, parse, type_of

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from sgray.protocol import SamplingParams

    Commands = _SubParsersAction[argparse.ArgumentParser]

DEFAULT_URL = "http://127.0.0.1:8000"
ENGINE_SECTIONS = ("model", "parallel", "memory", "schedule")

Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, 1 for an error that is explained, 2 for a wrong command line."""
    parser = build_parser()
    arguments = parse(parser, argv)
    command: Command | None = getattr(arguments, "command", None)
    if command is None:
        parser.print_help()
        return 2
    try:
        return command(arguments)
    except SgrayError as error:
        print(f"sgray: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="sgray", description="Serve and run large language models.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"sgray {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for add in (_add_serve, _add_chat, _add_generate, _add_pull, _add_config, _add_bench):
        add(commands)
    return parser


def _command(commands: Commands, name: str, run: Command, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.set_defaults(command=run, parser=parser)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="MODEL", help=f"hub id or directory (default: {DEFAULT_MODEL})")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-tokens", type=int, default=256, help="longest answer (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (the default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="share of probability to draw from")
    parser.add_argument("--seed", type=int, help="makes draws repeatable")


def _add_serve(commands: Commands) -> None:
    from sgray.launch_server import add_flags

    parser = _command(commands, "serve", _serve, "serve a model over HTTP with Ray Serve")
    _add_model(parser)
    add_flags(parser, port=8000)


def _add_chat(commands: Commands) -> None:
    parser = _command(commands, "chat", _chat, "chat in the terminal, with a server or with a model in this process")
    _add_model(parser)
    parser.add_argument("--url", help=f"a server to talk to, e.g. {DEFAULT_URL}; without it the model runs here")
    add_key_flags(parser)
    parser.add_argument("--system", help="a system message")
    _add_sampling(parser)
    add_config_flags(parser, sections=ENGINE_SECTIONS)


def _add_generate(commands: Commands) -> None:
    parser = _command(commands, "generate", _generate, "print the continuation of one prompt, in this process")
    parser.add_argument("prompt", help="the text to continue; - reads standard input")
    parser.add_argument("--chat", action="store_true", help="treat the prompt as a user's message")
    _add_sampling(parser)
    add_config_flags(parser, sections=ENGINE_SECTIONS)


def _add_pull(commands: Commands) -> None:
    parser = _command(commands, "pull", _pull, "fetch a model now, so that serving it starts at once")
    _add_model(parser)
    parser.add_argument("--revision", help="branch, tag or commit of a hub repository")


def _add_config(commands: Commands) -> None:
    parser = _command(commands, "config", _show, "show or explain the configuration")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    show = _command(actions, "show", _show, "the configuration that flags give on this machine, every auto decided")
    add_config_flags(show)
    text = "what a leaf is, its type, its default and when to change it; with flags, what each rank and node would hold"
    explain = _command(actions, "explain", _explain, text)
    explain.add_argument("leaf", nargs="?", help="section.name or name; all leaves without it")
    add_config_flags(explain, sections=ENGINE_SECTIONS)
    api = _command(actions, "api", _show_api, "the HTTP API: every route, body and answer, as the page docs/api.md")
    api.add_argument("--json", action="store_true", help="as OpenAPI 3.1, which a server has at /openapi.json")


def _add_bench(commands: Commands) -> None:
    from sgray.bench import kernels, offline, policies, serve, steps
    from sgray.bench.route import command as route

    parser = _command(commands, "bench", _run_offline, "measure the engine or a server")
    kinds = parser.add_subparsers(title="what to measure", metavar="KIND", required=True)
    serve.add_flags(_command(kinds, "serve", _run_client, "load a server over HTTP with streaming requests"))
    offline.add_flags(_command(kinds, "offline", _run_offline, "run named workloads on an engine in this process"))
    kernels.add_flags(
        _command(kinds, "kernels", _run_kernels, "time every kernel on a GPU beside torch and the ceiling")
    )
    steps.add_flags(_command(kinds, "steps", _run_steps, "the kernels of a decode step on a GPU, and its idle time"))
    policies.add_flags(
        _command(kinds, "policies", _run_policies, "routing policies beside each other, on real replicas")
    )
    route.add_flags(_command(kinds, "route", _run_route, "routing policies beside each other, on simulated replicas"))


def _serve(arguments: argparse.Namespace) -> int:
    from sgray.launch_server import launch

    return launch(arguments, **_named_model(arguments))


def _chat(arguments: argparse.Namespace) -> int:
    from sgray import chat

    start = [{"role": "system", "content": arguments.system}] if arguments.system else []
    if arguments.url:
        speaker = chat.remote_speaker(
            arguments.url,
            model=arguments.name,
            max_tokens=arguments.max_tokens,
            temperature=arguments.temperature,
            top_p=arguments.top_p,
            seed=arguments.seed,
            key=client_key(arguments.api_key, arguments.key_file),
        )
    else:
        from sgray.local import LocalModel

        local = LocalModel.load(config_from(arguments, **_named_model(arguments)))
        speaker = lambda messages: local.chat(messages, _sampling(arguments))  # noqa: E731
    return chat.converse(speaker, start)


def _generate(arguments: argparse.Namespace) -> int:
    from sgray.local import LocalModel

    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    model = LocalModel.load(config_from(arguments))
    sampling = _sampling(arguments)
    if arguments.chat:
        pieces = model.chat([{"role": "user", "content": prompt}], sampling)
    else:
        pieces = model.complete(prompt, sampling)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return 0


def _pull(arguments: argparse.Namespace) -> int:
    from sgray.models.hub import resolve_model

    print(resolve_model(arguments.name or DEFAULT_MODEL, revision=arguments.revision))
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from sgray.engine.executor import measure_hardware

    config = config_from(arguments).resolve(measure_hardware())
    for leaf in leaves():
        section, name = leaf.split(".")
        print(f"{leaf}: {getattr(getattr(config, section), name)}")
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    has_flags = bool(leaves().keys() & vars(arguments).keys())
    chosen = [leaf_named(arguments.leaf)] if arguments.leaf is not None else [] if has_flags else list(leaves())
    texts = [explanation(leaf) for leaf in chosen]
    if has_flags:
        texts.append(_shares(arguments))
    print("\n\n".join(texts))
    return 0


def _shares(arguments: argparse.Namespace) -> str:
    """What each rank would hold of the model that the flags name, which is fetched where it is not here."""
    from sgray.engine.executor import DTYPES, measure_hardware
    from sgray.models.hub import resolve_model
    from sgray.models.shares import share_of, table
    from sgray.models.spec import served_spec
    from sgray.parallel.mesh import Mesh

    config = config_from(arguments).resolve(measure_hardware())
    spec = served_spec(resolve_model(config.model.model_path, revision=config.model.revision), config)
    size, num_nodes = config.parallel.tp_size, config.parallel.nnodes
    shares = [share_of(spec, Mesh(rank, size, num_nodes), DTYPES[config.model.dtype]) for rank in range(size)]
    nodes = f"{num_nodes} nodes" if num_nodes > 1 else "1 node"
    return f"{config.model.model_path} in {config.model.dtype}, {size} ranks on {nodes}:\n{table(shares)}"


def _show_api(arguments: argparse.Namespace) -> int:
    from sgray.serve.openai.api_page import page
    from sgray.serve.openai.app import ROUTES
    from sgray.serve.openai.openapi import document

    api = document(ROUTES)
    print(json.dumps(api, indent=2) if arguments.json else page(api), end="\n" if arguments.json else "")
    return 0


def explanation(leaf: str) -> str:
    """What a leaf of the configuration is, in a few lines."""
    field = leaves()[leaf].model_fields[leaf.split(".")[1]]
    limits = ", ".join(str(limit) for limit in field.metadata)
    return "\n".join(
        line
        for line in (
            leaf,
            f"  {field.description}" if field.description else "",
            f"  type: {type_of(leaf)}" + (f" ({limits})" if limits else ""),
            f"  default: {field.default}",
            f"  flag: {flag_of(leaf)}",
        )
        if line
    )


def _run_client(arguments: argparse.Namespace) -> int:
    from sgray.bench import serve

    return serve.run(arguments)


def _run_offline(arguments: argparse.Namespace) -> int:
    from sgray.bench import offline

    return offline.run(arguments)


def _run_kernels(arguments: argparse.Namespace) -> int:
    from sgray.bench import kernels

    return kernels.run(arguments)


def _run_steps(arguments: argparse.Namespace) -> int:
    from sgray.bench import steps

    return steps.run(arguments)


def _run_policies(arguments: argparse.Namespace) -> int:
    from sgray.bench import policies

    return policies.run(arguments)


def _run_route(arguments: argparse.Namespace) -> int:
    from sgray.bench.route import command

    return command.run(arguments)


def _named_model(arguments: argparse.Namespace) -> dict[str, str]:
    """The MODEL of the command line as a default below the flags."""
    return {"model__model_path": arguments.name} if arguments.name else {}


def _sampling(arguments: argparse.Namespace) -> SamplingParams:
    from sgray.protocol import SamplingParams

    return SamplingParams(
        max_new_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )


if __name__ == "__main__":
    sys.exit(main())
