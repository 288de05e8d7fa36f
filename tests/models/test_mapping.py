"""Checkpoint names to our names."""

from __future__ import annotations

from sgray.models.mapping import Drop, Fuse, Mapping, Rename, Stack, Target

MAPPING = Mapping(
    [
        Rename("emb", "embedding"),
        Fuse(("l.{layer}.q", "l.{layer}.k"), "layers.{layer}.qk"),
        Drop("l.{layer}.junk"),
    ],
    num_layers=2,
)


def test_a_renamed_module_takes_every_tensor_along() -> None:
    assert MAPPING.target("emb.weight") == Target("embedding.weight")
    assert MAPPING.target("emb.scales") == Target("embedding.scales")


def test_fused_modules_are_pieces_in_their_order() -> None:
    assert MAPPING.target("l.1.q.weight") == Target("layers.1.qk.weight", 0)
    assert MAPPING.target("l.1.k.bias") == Target("layers.1.qk.bias", 1)


def test_names_lead_back() -> None:
    for name in ("emb.weight", "l.0.q.weight", "l.1.k.bias"):
        target = MAPPING.target(name)
        assert target is not None
        assert MAPPING.source(target) == name


def test_unknown_names_have_no_target() -> None:
    assert MAPPING.target("l.2.q.weight") is None
    assert MAPPING.target("weight") is None


def test_dropped_tensors_are_known_by_their_full_name() -> None:
    assert MAPPING.is_dropped("l.1.junk")
    assert not MAPPING.is_dropped("l.1.junk.weight")
    assert not MAPPING.is_dropped("emb.weight")


def test_a_stack_has_the_modules_of_one_expert_after_those_of_another() -> None:
    rule = Stack(("l.{layer}.e.{expert}.gate", "l.{layer}.e.{expert}.up"), "layers.{layer}.experts")
    mapping = Mapping([rule], num_layers=2, num_experts=3)
    assert mapping.target("l.1.e.0.up.weight") == Target("layers.1.experts.weight", 1)
    assert mapping.target("l.0.e.2.gate.weight") == Target("layers.0.experts.weight", 4)
    assert mapping.source(Target("layers.0.experts.weight", 4)) == "l.0.e.2.gate.weight"
    assert mapping.target("l.0.e.3.gate.weight") is None
