"""The replica table, without Serve."""

from __future__ import annotations

import json

from sgray.serve.table import Endpoint, ReplicaTable, table_of

HERE = Endpoint("127.0.0.1", 1234, "token")


def test_an_endpoint_survives_serves_json_metadata() -> None:
    assert Endpoint.from_metadata(json.loads(json.dumps(HERE.as_metadata()))) == HERE


def test_replicas_that_have_said_nothing_yet_are_left_out() -> None:
    table = ReplicaTable()
    table.replace([("a", {}), ("b", HERE.as_metadata()), ("c", {"other": 1})])
    seen: list[dict[str, Endpoint]] = []
    table.subscribe(seen.append)
    assert seen == [{"b": HERE}]


def test_listeners_hear_of_changes_and_only_of_changes() -> None:
    table = ReplicaTable()
    seen: list[dict[str, Endpoint]] = []
    table.subscribe(seen.append)
    for _ in range(3):
        table.replace([("a", HERE.as_metadata())])
    table.replace([])
    assert seen == [{}, {"a": HERE}, {}]


def test_each_deployment_has_one_table() -> None:
    assert table_of("app", "A") is table_of("app", "A")
    assert table_of("app", "A") is not table_of("app", "B")
    assert table_of("app", "A") is not table_of("other", "A")
