"""How much memory a row takes, and how long the table of Adam's corrections is."""

from __future__ import annotations

import numpy as np
import pytest

from ps.spec import Initial, InitMethod, Optimizer, TableSpec, UpdateRule, WeightFormat
from ps.store.rules import MOST_CORRECTIONS, TableLayout, corrections

STATE = {
    UpdateRule.SGD: 0, UpdateRule.MOMENTUM: 1, UpdateRule.ADAGRAD: 1, UpdateRule.ADAM: 2,
    UpdateRule.FTRL: 2,
}  # fmt: skip
"""State values of each rule for each weight."""
COUNTERS = 8 + 4 * 4
"""A key of 64 bits, and four counters of 32 bits."""


def layout(dim: int, rule: UpdateRule, weights: WeightFormat) -> TableLayout:
    return TableLayout.of(TableSpec("t", dim, Optimizer(rule), Initial(InitMethod.ZEROS), weights=weights))


@pytest.mark.parametrize("weights", WeightFormat)
@pytest.mark.parametrize("rule", [one for one in UpdateRule if one is not UpdateRule.ADD])
def test_a_row_holds_all_of_it_and_wastes_little(rule: UpdateRule, weights: WeightFormat) -> None:
    each = 4 if weights is WeightFormat.F4 else 2
    for dim in (1, 2, 3, 8, 15, 16, 17, 31, 64, 129):
        state = 1 if rule is UpdateRule.ROW_ADAGRAD else dim * STATE[rule]
        needed = COUNTERS + -(-dim * each // 4) * 4 + 4 * state
        found = layout(dim, rule, weights)
        assert (found.slots, 4 * found.weight_words) == (state, -(-dim * each // 4) * 4)
        grain = 8 if dim < 16 else 32  # an eighth, or a half of a cache line
        assert 0 <= found.row_bytes - needed < grain and found.row_bytes % grain == 0


@pytest.mark.parametrize("beta1", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("beta2", [0.3, 0.9, 0.999, 0.9999, 0.99999])
def test_corrections_are_listed_until_they_are_one_or_too_many(beta1: float, beta2: float) -> None:
    found = corrections(Optimizer(UpdateRule.ADAM, beta1=beta1, beta2=beta2))
    steps = found.shape[1]
    assert steps <= MOST_CORRECTIONS
    for step in {1, 2, 3, steps // 2, steps} - {0}:
        exact = [1 - beta1**step, (1 - beta2**step) ** 0.5]
        np.testing.assert_allclose(found[:, step - 1], exact, rtol=1e-7)
    assert (found[:, -1] == 1).all() or steps == MOST_CORRECTIONS
    if steps > 40:
        assert (found[:, steps * 9 // 10] < 1).any(), "not much longer than needed"


def test_the_table_of_other_rules_is_a_single_one() -> None:
    assert layout(4, UpdateRule.SGD, WeightFormat.F4).corrections.tolist() == [[1], [1]]
