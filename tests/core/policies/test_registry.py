# SPDX-License-Identifier: Apache-2.0
"""The tables of policies and scorers have exactly the names that the settings accept."""

from __future__ import annotations

from typing import get_args

from lbproxy.config.sections.routing import PolicyName, ScorerName
from lbproxy.core.policies.registry import POLICIES
from lbproxy.core.policies.scorers import SCORERS


def test_each_policy_of_the_settings_is_in_the_table_and_no_other() -> None:
    """A name in one of them only would be a KeyError at the start, or a policy that cannot be configured."""
    assert list(POLICIES) == list(get_args(PolicyName))


def test_each_scorer_of_the_settings_is_in_the_table_and_no_other() -> None:
    assert set(SCORERS) == set(get_args(ScorerName))
