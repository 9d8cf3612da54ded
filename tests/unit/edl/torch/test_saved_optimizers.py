"""Which saved groups of parameters belong to the groups of a worker."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("torch")

from edl.checkpoint.reading.assembly import NAMES
from edl.torch.saved_optimizers import SavedOptimizer, check_groups, find_homes

pytestmark = pytest.mark.torch


def saved(worker: int, *groups: Sequence[str]) -> SavedOptimizer:
    """An optimizer with these parameters; the option of each group is its number."""
    names = [name for group in groups for name in group]
    made = [
        {"params": [names.index(name) for name in group], "param_names": list(group), "option": number}
        for number, group in enumerate(groups)
    ]
    return SavedOptimizer(worker, {"state": {0: {"step": 1}, "all": 2}, "param_groups": made, NAMES: names, "more": 3})


def test_a_parameter_is_at_home_with_the_first_worker_that_has_saved_it() -> None:
    workers = [saved(0, "ab"), saved(1, "bc"), saved(2, "cd")]
    left = iter(workers)
    assert find_homes("cab", left) == {"c": workers[1], "a": workers[0], "b": workers[0]}
    assert next(left) is workers[2], "nobody has looked at it"
    assert find_homes("xd", workers) == {"d": workers[2]}


def test_options_are_those_of_the_same_group_or_else_of_that_of_the_first_parameter() -> None:
    one = saved(0, "ab", "c", "d")
    assert one.options(1, "ac") == {"option": 1}
    assert one.options(1, "da") == {"option": 2}
    assert one.options(7, "b") == {"option": 0}


def test_what_belongs_to_no_parameter() -> None:
    assert saved(0, "a").beside == {"state": {"all": 2}, "more": 3}


@pytest.mark.parametrize(
    ("stages", "groups"),
    [
        ([["ab"], ["cd"]], ["ab", "cd"]),
        ([["ab"], ["cd"]], ["abcd"]),
        ([["ab"], ["cd"]], ["cd"]),
        ([["ab"], ["c", "d"]], ["d"]),
        ([["a", "b"], ["cd"]], ["", "dcb", "a"]),
    ],
)
def test_stages_may_be_divided_in_another_way(stages: Sequence[Sequence[str]], groups: Sequence[str]) -> None:
    names = "".join(groups)
    homes = find_homes(names, [saved(number, *kept) for number, kept in enumerate(stages)])
    check_groups(homes.values(), groups, set(names))


def test_each_worker_may_have_an_expert_of_its_own() -> None:
    names = ["shared", "expert3"]
    homes = find_homes(names, [saved(number, ["shared"], [f"expert{number}"]) for number in range(4)])
    assert [homes[name].worker for name in names] == [0, 3]
    check_groups(homes.values(), [["shared"], ["expert3"]], set(names))


@pytest.mark.parametrize(
    ("kept", "groups", "known", "numbers"),
    [
        (("a", "b"), ("ab",), "ab", "1 groups of parameters, 2 were"),
        (("ab",), ("a", "b"), "ab", "2 groups of parameters, 1 were"),
        (("a", "b"), ("a",), "ab", "1 groups of parameters, 2 were"),
    ],
    ids=["joined", "divided", "one is missing"],
)
def test_another_number_of_groups_for_the_parameters_of_one_stage_is_refused(
    kept: Sequence[str], groups: Sequence[str], known: str, numbers: str
) -> None:
    with pytest.raises(ValueError, match=numbers):
        check_groups([saved(0, *kept)], groups, set(known))
