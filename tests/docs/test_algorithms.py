"""docs/algorithms.md: every algorithm, advantage and loss as declared, a job for each, and one of one's own."""

import re
from pathlib import Path

import pytest

from rlplan.planner.search import find_plan
from rlplan.runtime.losses.advantages import ADVANTAGES
from rlplan.runtime.losses.registry import OWN, find_advantage
from rlplan.spec.files.job_file import load_job
from rlplan.spec.parts.algorithm import ALGORITHMS
from tests.docs.documentation import DOCS, EXAMPLES, read, rows, section, words
from tests.factories import write_job
from tests.repository.at_night import mark_nightly

PAGE = read(DOCS / "algorithms.md")
JOBS = sorted((EXAMPLES / "algorithms").glob("*.yaml"))


def test_the_table_says_what_is_declared() -> None:
    table = {words(row[0])[0]: row for row in rows(section(PAGE, "All of them"))}
    assert set(table) == set(ALGORITHMS)
    for name, declared in ALGORITHMS.items():
        _, advantage, loss, defaults, source = table[name]
        assert (words(advantage), words(loss)) == ([declared.advantage], [declared.loss])
        documented = dict(re.findall(r"`(\w+)` ([\w.-]+)", defaults))
        assert {key: str(value) for key, value in documented.items()}.keys() == declared.defaults.keys()
        for key, value in declared.defaults.items():
            assert documented[key] == value if isinstance(value, str) else float(documented[key]) == value
        assert (re.search(r"arXiv:[\d.]+\d", source) or [""])[0] in declared.source


@pytest.mark.parametrize(("heading", "known"), [("Advantages", ADVANTAGES), ("Losses", OWN)])
def test_every_advantage_and_loss_has_its_equation(heading: str, known: dict[str, object]) -> None:
    assert {words(row[0])[0] for row in rows(section(PAGE, heading))} == set(known)


def test_there_is_a_job_for_each() -> None:
    assert {load_job(path).algorithm.name for path in JOBS} == set(ALGORITHMS)


@pytest.mark.parametrize("path", mark_nightly(JOBS, but=JOBS[::4]), ids=lambda path: path.stem)
def test_a_job_can_be_planned(path: Path) -> None:
    assert find_plan(load_job(path)).job.algorithm.name == path.stem


def test_the_algorithm_of_one_s_own_is_one(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", section(PAGE, "One of your own"), re.DOTALL)
    assert code
    (tmp_path / "my_algorithm.py").write_text(code.group(1))
    job = load_job(write_job(tmp_path, algorithm={"path": "my_algorithm.py:MINE", "name": "positive_only"}))
    assert find_plan(job).job.scored_roles == ()
    assert find_advantage(job.algorithm)([], job.algorithm) == []
