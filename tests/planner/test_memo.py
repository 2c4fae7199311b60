"""A memo keeps what pure methods gave, by facts and arguments."""

from rlplan.planner.memo import MOST_TABLES, Memo, memoize


class Sums:
    def __init__(self, memo: Memo, *facts: object) -> None:
        self.known = memo.get_table(Sums, *facts)
        self.num_asked = 0

    @memoize
    def add(self, first: int, other: int = 0) -> int:
        self.num_asked += 1
        return first + other


def test_equal_arguments_are_computed_once() -> None:
    sums = Sums(Memo(), "facts")
    assert [sums.add(1, 2), sums.add(1, 2), sums.add(1, other=2)] == [3, 3, 3]
    assert sums.num_asked == 2, "by position, and by name"


def test_objects_with_equal_facts_share_a_table_and_others_do_not() -> None:
    memo = Memo()
    sums, alike, other = Sums(memo, [1], "a"), Sums(memo, [1], "a"), Sums(memo, [2], "a")
    for each in (sums, alike, other):
        assert each.add(1, 2) == 3
    assert (sums.num_asked, alike.num_asked, other.num_asked) == (1, 0, 1)
    assert Sums(Memo(), [1], "a").known is not sums.known


def test_a_memo_that_is_off_keeps_nothing() -> None:
    sums = Sums(Memo(is_on=False), "facts")
    assert [sums.add(1, 2), sums.add(1, 2)] == [3, 3]
    assert sums.num_asked == 2


def test_the_tables_that_were_used_longest_ago_are_dropped() -> None:
    memo = Memo()
    first = Sums(memo, -1)
    for number in range(MOST_TABLES - 1):
        Sums(memo, number)
    assert Sums(memo, -1).known is first.known
    Sums(memo, "one more")
    assert Sums(memo, -1).known is first.known, "it was used last"
    for number in range(MOST_TABLES):
        Sums(memo, -2 - number)
    assert Sums(memo, -1).known is not first.known
