"""What crosses processes: hashes that are the same everywhere, and plain data."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys

import pytest

from sgray import protocol
from sgray.protocol import CacheEvent, Delta, Load, Request, SamplingParams, chain_hashes, namespace_key, page_hashes


def test_page_hashes_have_golden_values() -> None:
    """These numbers travel between replicas and ingresses of one cluster; a change of them is a change of protocol."""
    assert namespace_key().hex() == "fb4c153349f5c33b3080fa7f7c8010e8"
    assert page_hashes(range(10), 4, namespace_key()) == [0xE38E4CBFE9D33712, 0xF14150C5614CA793]


def test_page_hashes_are_the_same_in_another_process_with_another_hash_seed() -> None:
    code = "from sgray.protocol import *; print(page_hashes(range(10), 4, namespace_key(salt='x')))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == str(page_hashes(range(10), 4, namespace_key(salt="x")))


def test_a_hash_stands_for_the_page_and_all_before_it() -> None:
    space = namespace_key()
    one, other = page_hashes([1, 2, 3, 4, 5, 6], 2, space), page_hashes([1, 2, 9, 4, 5, 6], 2, space)
    assert one[0] == other[0] and one[1] != other[1] and one[2] != other[2]


def test_only_whole_pages_are_hashed() -> None:
    space = namespace_key()
    assert page_hashes([1, 2, 3, 4, 5], 2, space) == page_hashes([1, 2, 3, 4], 2, space)
    assert page_hashes([], 4, space) == page_hashes([1, 2, 3], 4, space) == []


def test_a_chain_can_be_continued() -> None:
    rng = random.Random(0)
    tokens = [rng.randrange(2**31) for _ in range(40)]
    whole = page_hashes(tokens, 4, namespace_key())
    assert whole[:3] + chain_hashes(tokens[12:], 4, whole[2]) == whole
    assert len(set(whole)) == 10 and all(0 <= value < 2**64 for value in whole)


def test_namespaces_differ_when_any_field_does() -> None:
    fields = ["weights_version", "adapter", "salt", "media"]
    keys = {namespace_key()}
    keys.update(namespace_key(**{field: "x"}) for field in fields)
    keys.update(namespace_key(**{field: "xx"}) for field in fields)
    keys.add(namespace_key(adapter="x", salt="x"))
    keys.add(namespace_key(adapter="xs", salt=""))
    assert len(keys) == 11
    assert len({page_hashes([1, 2], 2, key)[0] for key in keys}) == 11


@pytest.mark.parametrize(
    "value",
    [SamplingParams(), Request("a", [1]), CacheEvent("cleared"), Load()],
    ids=lambda v: type(v).__name__,
)
def test_messages_are_frozen_and_without_a_dictionary(value: object) -> None:
    name = dataclasses.fields(value)[0].name  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, None)
    assert not hasattr(value, "__dict__")


def test_a_delta_has_no_dictionary() -> None:
    assert not hasattr(Delta("a"), "__dict__")


def test_defaults_are_not_shared() -> None:
    assert Delta("a").tokens is not Delta("b").tokens
    assert SamplingParams().logit_bias is not SamplingParams().logit_bias


def test_every_type_says_what_it_is() -> None:
    types = [value for value in vars(protocol).values() if dataclasses.is_dataclass(value)]
    assert len(types) >= 10 and all(value.__doc__ and "(" not in value.__doc__[:20] for value in types)
