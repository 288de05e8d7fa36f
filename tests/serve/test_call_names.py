"""Which requests a name means."""

from __future__ import annotations

import pytest

from sgray.serve.call_names import is_of_call, request_id


@pytest.mark.parametrize(
    ("given", "name", "is_meant"),
    [
        ("job", "job", True),
        ("job_3", "job", True),
        ("job_3", "job_3", True),
        ("job_3_0", "job", True),
        ("job_3_0", "job_3", True),
        ("job_31", "job_3", False),
        ("job-3", "job", False),
        ("jobs", "job", False),
        ("a/b", "a/b", True),
        ("a/b", "a", False),
        ("a/b_2", "a/b", True),
        ("job", "cmpl-7", False),
        ("", "cmpl-7", True),
        ("", "cmpl-7-4", True),
        ("", "cmpl", False),
        ("", "cmpl-7-", False),
    ],
)
def test_a_name_means_its_call_and_the_members_of_its_list(given: str, name: str, is_meant: bool) -> None:
    assert is_of_call(request_id("cmpl-7", 4, given), name) is is_meant
