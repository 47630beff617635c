"""The SQL of a scan: after the watermark, up to the batch's last key or the range's end, row by row."""

from __future__ import annotations

import pytest

from airflow_roir.scan_range import Key, ScanRange

ONE = (["id"], ["bigint"])


@pytest.mark.parametrize(
    ("scan", "last", "condition", "values"),
    [
        (ScanRange(None, None), None, "true", {}),
        (ScanRange(["1"], None), None, '"id"::bigint >= %(l0)s::bigint', {"l0": "1"}),
        (ScanRange(None, ["9"]), None, '"id"::bigint < %(u0)s::bigint', {"u0": "9"}),
        (
            ScanRange(["1"], ["9"], ["4"]),
            None,
            '"id"::bigint > %(w0)s::bigint AND "id"::bigint < %(u0)s::bigint',
            {"w0": "4", "u0": "9"},
        ),
        (
            ScanRange(["1"], ["9"]),
            ["3"],
            '"id"::bigint >= %(l0)s::bigint AND "id"::bigint <= %(k0)s::bigint',
            {"l0": "1", "k0": "3"},
        ),
        (
            ScanRange(["1"], ["9"], ["3"]),
            ["5"],
            '"id"::bigint > %(w0)s::bigint AND "id"::bigint <= %(k0)s::bigint',
            {"w0": "3", "k0": "5"},
        ),
    ],
)
def test_a_range_is_half_open_and_goes_on_after_its_watermark(
    scan: ScanRange, last: Key | None, condition: str, values: dict[str, str]
) -> None:
    bound: dict[str, str] = {}
    assert scan.condition(*ONE, last, bound) == condition
    assert bound == values


def test_a_composite_key_is_compared_row_wise_with_quoted_names_and_bound_values() -> None:
    bound: dict[str, str] = {}
    scan = ScanRange(None, ["z", "\\x00"], ["'; DROP TABLE t --", "%s"])
    condition = scan.condition(['a"b', "%(w0)s"], ["text", "bytea"], None, bound)
    leading, columns = '"a""b"::text', '("a""b"::text, "%(w0)s"::bytea)'
    assert condition == (
        f"{leading} >= %(w0)s::text AND {columns} > (%(w0)s::text, %(w1)s::bytea) "
        f"AND {leading} <= %(u0)s::text AND {columns} < (%(u0)s::text, %(u1)s::bytea)"
    )
    assert bound == {"w0": "'; DROP TABLE t --", "w1": "%s", "u0": "z", "u1": "\\x00"}


def test_a_key_of_another_width_is_an_error_not_a_wrong_scan() -> None:
    with pytest.raises(ValueError, match="zip"):
        ScanRange(["1", "2"], None).condition(*ONE, None, {})
