"""What choices have in common is asked for once, and each gets the logprobs of its own tokens all the same."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgray.lang.choice_tree import ChoiceTree


def answered(tree: ChoiceTree) -> list[list[list[list[object]]]]:
    """For each place of each path an entry of every id, whose logprob is the place and the id themselves."""
    return [
        [
            [[(*path.tokens[:length], token), token, None] for token in path.ids]
            for length in range(len(path.tokens) + 1)
        ]
        for path in tree.paths
    ]


@pytest.mark.parametrize(
    ("choices", "paths"),
    [
        ([[1], [2], [3]], [()]),
        ([[1], [1, 2], [1, 2, 3]], [(1, 2)]),
        ([[1, 2], [1, 3], [4, 5], [6]], [(1,), (4,)]),
        ([[7], [7]], [()]),
    ],
)
def test_a_sequence_is_needed_only_where_a_choice_goes_on(choices: list[list[int]], paths: list[tuple[int]]) -> None:
    assert [path.tokens for path in ChoiceTree(choices).paths] == paths


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=12))
def test_every_choice_finds_the_entry_of_each_of_its_tokens(choices: list[list[int]]) -> None:
    tree = ChoiceTree(choices)
    for choice, entries in zip(choices, tree.entries(answered(tree)), strict=True):
        assert [entry[0] for entry in entries] == [tuple(choice[: end + 1]) for end in range(len(choice))]
    assert len(tree.paths) <= len(choices)
    assert all(len(set(path.ids)) == len(path.ids) for path in tree.paths)
