"""The quick models of the zoo (zoo.py, which is the command for all of them)."""

from __future__ import annotations

import pytest
import zoo


@pytest.mark.parametrize("name", zoo.QUICK)
def test_loss_and_gradients(name: str) -> None:
    outcome = zoo.compare(name)
    assert outcome.passed, outcome


def test_a_failure_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "LOSS_RTOL", -1.0)
    assert not zoo.compare("opt").passed
