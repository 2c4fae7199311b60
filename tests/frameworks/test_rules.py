"""Rules of a framework: which values a search may try, what a job leaves to them, and what it states in vain."""

import pytest

from rlplan.frameworks.profile import NAMES, find_release
from rlplan.frameworks.rules import Rule, RuleBook
from rlplan.spec.files.job_schema import job_keys

PLACED = Rule("placement.placement", "a reason", only=("colocated", "disaggregated"), searched=("colocated",))
SLEEPS = Rule("rollout.sleep_level", "a reason", only=(2,), when={"placement.placement": "colocated"})
HOSTS = Rule(
    "placement.offload", "a reason", only=("host",), when={"algorithm.kl_coef": ">0", "training.tp": {"not": 1}}
)
OPEN = {
    "placement.placement": "auto",
    "rollout.sleep_level": "auto",
    "placement.offload": "auto",
    "training.tp": "auto",
}


def book(*rules: Rule, **values: object) -> RuleBook:
    job = {**OPEN, **{key.replace("__", "."): value for key, value in values.items()}}
    return RuleBook(rules, lambda key: job.get(key))


def test_an_open_key_is_searched_among_fewer_values_than_a_job_may_state() -> None:
    assert not book(PLACED).allows({"placement.placement": "disaggregated"})
    assert book(PLACED, placement__placement="disaggregated").allows({"placement.placement": "disaggregated"})


def test_a_key_with_one_value_is_settled_once_its_condition_is_certain() -> None:
    assert book(PLACED, SLEEPS).settle() == {"placement.placement": "colocated", "rollout.sleep_level": 2}
    assert book(SLEEPS).settle() == {}


def test_a_rule_is_judged_when_all_that_it_asks_for_is_chosen() -> None:
    rules = book(HOSTS, algorithm__kl_coef=0.1)
    assert rules.allows({"placement.offload": "none"})
    assert not rules.allows({"placement.offload": "none", "training.tp": 2})
    assert rules.allows({"placement.offload": "none", "training.tp": 1})


def test_a_stated_value_that_is_lacking_is_named_and_leaves_the_search_alone() -> None:
    rules = book(SLEEPS, placement__placement="colocated", rollout__sleep_level=1)
    assert [(rule.key, value) for rule, value in rules.find_lacking()] == [("rollout.sleep_level", 1)]
    assert rules.allows({"rollout.sleep_level": 1})
    assert not list(rules.replace_values({"rollout.sleep_level": 2}).find_lacking())


@pytest.mark.parametrize("name", NAMES)
def test_every_rule_is_about_a_key_of_a_job_and_says_why(name: str) -> None:
    parts = {key.rpartition(".")[0] for key in job_keys()}
    for rule in find_release(name).rules:
        assert rule.key in job_keys() or rule.key in parts, rule.key
        assert rule.only
        assert rule.why
        assert not rule.why.endswith(".")


def test_a_rule_may_name_the_value_of_another_key() -> None:
    alike = Rule("rollout.sleep_level", "a reason", only=("=training.tp",))
    assert book(alike, training__tp=2).settle() == {"rollout.sleep_level": 2}
    assert book(alike).settle() == {}
    rules = book(alike, training__tp=2, rollout__sleep_level=1)
    ((rule, value),) = rules.find_lacking()
    assert (value, rules.cure(rule)) == (1, 2)
    assert not list(book(alike, training__tp=2, rollout__sleep_level=2).find_lacking())


def test_some_rules_are_of_releases_before_or_since_one() -> None:
    def levels(label: str) -> set[int]:
        rules = find_release(label).rules
        return {value for rule in rules if rule.key == "rollout.sleep_level" for value in rule.only}

    assert levels("verl@0.5") == {1}
    assert levels("verl@0.6") == levels("verl") == {1, 2}
