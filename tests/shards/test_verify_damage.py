"""Every kind of damage on either side is found by every mode that promises it, named, and repaired."""

from __future__ import annotations

import pytest

from airflow_roir.engine.lifecycle import verify
from airflow_roir.engine.verify.report import VerifyReport
from airflow_roir.options import VerifyOptions
from tests.shards.conftest import Make
from tests.shards.verified import Verified, build

TABLE = "CREATE TABLE t (id bigint, part text, k numeric, v text, n numeric, at timestamptz, PRIMARY KEY (part, id))"
FILL = (
    "INSERT INTO t SELECT i, (i % 3)::text, nullif(i % 11, 4), 'v' || i, i, 'epoch'::timestamptz + i * interval '1 s' "
    "FROM generate_series(1, 120) i"
)
# Columns: c1 k, c2 shard, c3 part, c4 id, c5 v, c6 n, c7 at.
ON_INDEX = {
    "missing": ["DELETE FROM {base} WHERE c2 = 's0' AND c4 = 20"],
    "missing, NULL": ["DELETE FROM {base} WHERE c2 = 's1' AND c1 IS NULL AND c4 < 100"],
    "missing, all of a shard": ["DELETE FROM {base} WHERE c2 = 's1'"],
    "missing, all": ["TRUNCATE {base}"],
    "extra": ["INSERT INTO {base} SELECT c1, c2, c3, 5000, c5, c6, c7 FROM {base} WHERE c2 = 's0' AND c4 = 20"],
    "extra, another key": ["INSERT INTO {base} SELECT 99, c2, c3, c4, c5, c6, c7 FROM {base} WHERE c4 = 15"],
    "another key": ["UPDATE {base} SET c1 = 98 WHERE c2 = 's1' AND c4 = 8"],
    "different": ["UPDATE {base} SET c5 = 'other' WHERE c4 = 7"],
    "different, NULL": ["UPDATE {base} SET c5 = NULL WHERE c2 = 's0' AND c4 = 9"],
    "another image of a key": ["UPDATE {base} SET c1 = 1.00 WHERE c2 = 's0' AND c1 = 1 AND c4 < 50"],
    "another image of a value": ["UPDATE {base} SET c6 = 30.0 WHERE c2 = 's0' AND c4 = 30"],
    "another time": ["UPDATE {base} SET c7 = c7 + interval '1 microsecond' WHERE c2 = 's0' AND c4 = 30"],
    "swapped values": [
        "UPDATE {base} SET c5 = CASE c4 WHEN 31 THEN 'v42' ELSE 'v31' END WHERE c2 = 's0' AND c4 IN (31, 42)"
    ],
    "another shard's name": ["UPDATE {base} SET c2 = 's1', c4 = 7777 WHERE c2 = 's0' AND c4 = 12"],
    "swapped shards": [
        "UPDATE {base} SET c2 = 'x' WHERE c2 = 's0' AND c4 = 13",
        "UPDATE {base} SET c2 = 's0', c5 = 'of s1' WHERE c2 = 's1' AND c4 = 13",
        "UPDATE {base} SET c2 = 's1' WHERE c2 = 'x'",
    ],
    "a shard that nobody has": ["INSERT INTO {base} SELECT c1, 'gone', c3, c4, c5, c6, c7 FROM {base} WHERE c4 < 5"],
}
IN_SHARD = {
    "a row that was not captured": ["INSERT INTO t VALUES (900, '1', 3, 'n', 1, 'epoch')"],
    "a row's end that was not captured": ["DELETE FROM t WHERE id = 33"],
    "a key that was not captured": ["UPDATE t SET k = 55 WHERE id IN (3, 44)"],
    "a value that was not captured": ["UPDATE t SET v = 'quiet' WHERE id = 5"],
    "an image that was not captured": ["UPDATE t SET n = 6.000 WHERE id = 6"],
    "all was not captured": ["UPDATE t SET v = v || '!'"],
    "the end of all was not captured": ["DELETE FROM t"],
}
MODES = {
    "whole": [VerifyOptions()],
    "in one unit each": [VerifyOptions(sample=100)],
    "within a time": [VerifyOptions(max_seconds=600)],
    "in slices": [VerifyOptions(slices=3)] * 3,
}


def _damage(one: Verified, case: str) -> None:
    one.run(*ON_INDEX.get(case, []))
    if case in IN_SHARD:
        trigger = f"roir_{one.feeds['s1'].outbox}"
        one.made.run(
            f"ALTER TABLE t DISABLE TRIGGER {trigger}",
            *IN_SHARD[case],
            f"ALTER TABLE t ENABLE ALWAYS TRIGGER {trigger}",
            only="s1",
        )


def _verify(one: Verified, options: list[VerifyOptions]) -> list[VerifyReport]:
    return [verify(one.made.database, "ix", option) for option in options]


@pytest.mark.sample(0)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", [*ON_INDEX, *IN_SHARD])
def test_every_kind_of_damage_is_found_and_repaired(shards: Make, case: str, mode: str) -> None:
    one = build(shards(2, TABLE, FILL), include="v, n, at")
    _damage(one, case)
    assert not one.is_exact()
    told = _verify(one, MODES[mode])
    assert sum(report.found for report in told) > 0, mode
    assert all(report.repaired == 0 and report.damaged == 0 and report.corrupt == 0 for report in told), told
    assert all(found["primary_key"]["shard"] for report in told for found in report.first)
    with one.shipping():
        told = _verify(one, [VerifyOptions(**{**option.fixed(), "repair": True}) for option in MODES[mode]])
    assert all(report.is_exact for report in told), (mode, told)
    assert one.is_exact(), mode
    assert sum(report.found for report in _verify(one, MODES[mode])) == 0, mode


@pytest.mark.by_hand("sweeps")
def test_an_entry_in_another_segment_is_damage(shards: Make) -> None:
    one = build(shards(2, TABLE, FILL), include="v, n, at", segments=3)
    [(right,)] = one.made.ask(f"SELECT tableoid::regclass::text FROM {one.base} WHERE c2 = 's0' AND c4 = 20")
    [(wrong,)] = one.made.ask(
        # Not that of NULLs, which takes nothing else.
        "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = %s::regclass AND inhrelid <> %s::regclass "
        "AND right(inhrelid::regclass::text, 5) <> '_s000' ORDER BY inhrelid LIMIT 1",
        one.base,
        right,
    )
    one.made.ask(f"CREATE TABLE kept AS SELECT * FROM {one.base} WHERE c2 = 's0' AND c4 = 20")
    one.run(
        "DELETE FROM {base} WHERE c2 = 's0' AND c4 = 20",
        f"UPDATE pg_class SET relispartition = false WHERE oid = '{wrong}'::regclass",
        f"INSERT INTO {wrong} SELECT * FROM kept",
        f"UPDATE pg_class SET relispartition = true WHERE oid = '{wrong}'::regclass",
    )
    for options in (VerifyOptions(), VerifyOptions(sample=100)):
        report = verify(one.made.database, "ix", options)
        assert (report.missing, report.damaged, report.extra) == (1, 1, 0)
    with one.shipping():
        report = verify(one.made.database, "ix", VerifyOptions(repair=True))
        assert (report.found, report.repaired) == (2, 1)
        report = verify(one.made.database, "ix", VerifyOptions(repair=True))
        assert (report.missing, report.damaged, report.is_exact) == (0, 1, False)
