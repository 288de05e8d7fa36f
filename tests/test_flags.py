from __future__ import annotations

import argparse

import pytest

from sgray.config import Config, leaves
from sgray.errors import ConfigError
from sgray.flags import add_config_flags, config_from, flag_of, leaf_named, parse, type_of


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="prog", allow_abbrev=False)
    add_config_flags(made)
    return made


def other_value(leaf: str) -> str | None:
    """A value that differs from the leaf's default, as a user would type it; None for a switch."""
    field = leaves()[leaf].model_fields[leaf.split(".")[1]]
    if field.annotation is bool:
        return None
    words = type_of(leaf).split(" | ")
    if "INT" in words or "FLOAT" in words:
        return "0.5" if leaf == "memory.mem_fraction_static" else "2049"
    if "STR" in words:
        return "http://other/v1/traces" if leaf == "serve.otlp_traces_endpoint" else "other"
    return next(word for word in words if word != field.default)


@pytest.mark.parametrize("leaf", sorted(leaves()))
def test_every_leaf_can_be_set_by_its_flag(leaf: str) -> None:
    value = other_value(leaf)
    argv = [flag_of(leaf)] + ([] if value is None else [value])
    if leaf in ("parallel.nnodes", "parallel.ep_size"):
        argv += ["--tp", str(value)]
    if leaf == "serve.min_replicas":
        argv += ["--max-replicas", "4096"]
    section, name = leaf.split(".")
    got = getattr(getattr(config_from(parse(parser(), argv)), section), name)
    default = getattr(getattr(Config(), section), name)
    assert got != default
    assert str(got) in (value, f"{value}.0", "True")


def test_switches_default_to_off_so_that_a_bare_flag_changes_them() -> None:
    switches = [leaf for leaf, section in leaves().items() if type_of(leaf) == "BOOL"]
    assert switches
    assert not any(leaves()[leaf].model_fields[leaf.split(".")[1]].default for leaf in switches)


def test_no_flags_give_the_default_configuration() -> None:
    assert config_from(parse(parser(), [])) == Config()


def test_short_forms_mean_the_same_leaf() -> None:
    config = config_from(parse(parser(), ["--model", "m", "--tp", "2"]))
    assert (config.model.model_path, config.parallel.tp_size) == ("m", 2)


def test_flags_win_over_defaults() -> None:
    arguments = parse(parser(), ["--dtype", "float32"])
    config = config_from(arguments, model__dtype="bfloat16", model__device="cpu")
    assert (config.model.dtype, config.model.device) == ("float32", "cpu")


def test_a_wrong_value_names_its_leaf() -> None:
    with pytest.raises(ConfigError, match=r"memory\.mem_fraction_static: .*less than 1"):
        config_from(parse(parser(), ["--mem-fraction-static", "3"]))


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        ("--mem-fraction", "--mem-fraction-static"),
        ("--max-runing-requests=3", "--max-running-requests"),
        ("--modle-path", "--model-path"),
    ],
)
def test_an_unknown_flag_is_refused_with_the_nearest_known_one(
    typed: str, nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(parser(), [typed, "3"])
    assert caught.value.code == 2
    assert f"nearest known one is {nearest} " in capsys.readouterr().err


@pytest.mark.parametrize(
    "typed",
    [
        ["--quantization", "fp8"],
        ["--speculative-algorithm", "EAGLE3"],
        ["--speculative-draft-model-path", "d", "--speculative-num-draft-tokens", "4"],
        ["--api-key=secret"],
        ["--admin-api-key", "secret"],
        ["--radix-eviction-policy", "lfu"],
        ["--dp-size", "2"],
    ],
)
def test_a_flag_of_a_missing_feature_is_refused_as_not_available(
    typed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(parser(), typed)
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert "is not available in this version; " in message
    assert "secret" not in message


@pytest.mark.parametrize("typed", [["--radix-eviction-policy", "lru"], ["--radix-eviction-policy=lru"]])
def test_the_eviction_policy_that_exists_is_accepted(typed: list[str]) -> None:
    assert config_from(parse(parser(), [*typed, "--tp", "2"])).parallel.tp_size == 2


def test_cluster_flags_are_accepted_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--tp", "16", "--nnodes", "2", "--node-rank=1", "--dist-url", "tcp://head:29500", "--dtype", "float32"]
    config = config_from(parse(parser(), argv))
    assert (config.parallel.tp_size, config.parallel.nnodes, config.model.dtype) == (16, 2, "float32")
    explained = capsys.readouterr().err
    assert all(f"{flag} is not needed" in explained for flag in ("--node-rank", "--dist-url"))


def test_a_stray_word_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(parser(), ["stray"])
    assert "unexpected argument 'stray'" in capsys.readouterr().err


def test_a_leaf_is_found_by_its_full_or_its_last_name() -> None:
    assert leaf_named("memory.page_size") == leaf_named("page_size") == "memory.page_size"
    with pytest.raises(ConfigError, match="nearest one is 'page_size'"):
        leaf_named("pagesize")
