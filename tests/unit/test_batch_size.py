"""How many rows a batch copies: about a second's worth, within bounds."""

from __future__ import annotations

from airflow_roir.engine.scan.batch_size import FEWEST_ROWS, FIRST_ROWS, GROWTH, REMEMBERED, BatchSize

MOST = 10_000_000


def after(*batches: tuple[int, float], target_s: float = 1.0, most: int = MOST) -> int:
    size = BatchSize(target_s)
    for rows, seconds in batches:
        size.took(rows, seconds)
    return size.rows(most)


def test_the_first_batch_is_small_and_within_the_wanted_rows() -> None:
    assert after() == FIRST_ROWS
    assert after(most=100) == 100
    assert after(most=1) == 1


def test_it_grows_by_leaps_to_what_takes_the_target_time() -> None:
    assert after((10_000, 0.01)) == 10_000 * GROWTH
    assert after((10_000, 0.01), (40_000, 0.04)) == 40_000 * GROWTH
    assert after((100_000, 0.5)) == 200_000
    assert after((100_000, 0.5), most=150_000) == 150_000


def test_it_shrinks_at_once_and_the_slowest_of_the_last_ones_decides() -> None:
    assert after((100_000, 10.0)) == 10_000
    assert after((10_000, 0.1), (10_000, 1.0), *[(10_000, 0.1)] * (REMEMBERED - 1)) == 10_000
    assert after((10_000, 1.0), *[(10_000, 0.1)] * REMEMBERED) == 40_000


def test_a_target_is_kept() -> None:
    assert after((10_000, 1.0), target_s=0.25) == 2_500


def test_it_never_falls_below_what_a_commit_is_worth() -> None:
    assert after((10_000, 3_600.0)) == FEWEST_ROWS


def test_the_few_rows_at_the_end_of_a_range_say_nothing() -> None:
    assert after((100_000, 1.0), (3, 0.5)) == 100_000
    assert after((0, 0.5)) == FIRST_ROWS


def paced(seconds_per_row: float, batches: int = 10) -> int:
    """The rows of the last of some batches under a pace."""
    size, rows = BatchSize(1.0), 0
    for _ in range(batches):
        rows = size.rows(MOST, 0.1)
        size.took(rows, rows * seconds_per_row)
    return rows


def test_paced_batches_grow_to_their_part_of_the_target_time() -> None:
    """They stayed at 4,000 rows, ten milliseconds of work, and a build took ten times as long as its limit allowed."""
    assert paced(1e-6) == 100_000
    assert paced(1e-5) == 10_000


def test_paced_batches_of_few_rows_are_learned_from() -> None:
    """If rows are wide, a tenth of a batch may have fewer rows than the least that is otherwise learned from."""
    assert paced(1e-3) == 100
    size = BatchSize(1.0)
    size.took(FEWEST_ROWS, 3.0)
    size.took(size.rows(MOST, 0.1), 1e-3)
    for _ in range(REMEMBERED):
        size.took(size.rows(MOST, 0.1), 1e-3)
    assert size.rows(MOST, 0.1) > 1_000
