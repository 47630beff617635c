"""A wrong value of any option of any operator fails in the first task, at once, and has changed nothing.

Nor does one that comes later: by the form, by a task that continues, by the Task State Store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import pytest
from airflow.dag_processing.dagbag import DagBag
from airflow.sdk import DAG
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    ParamValidationError,
)

from airflow_roir.engine.control import requests
from airflow_roir.engine.verify import record
from airflow_roir.operators import prepare as preparing
from airflow_roir.operators.build import BuildIndexOperator
from airflow_roir.operators.clean_up import CleanUpIndexesOperator
from airflow_roir.operators.compact import CompactIndexOperator
from airflow_roir.operators.control import (
    AbortIndexBuildOperator,
    ChangeIndexBuildOperator,
    PauseIndexBuildOperator,
    ResumeIndexBuildOperator,
    RevertIndexOperator,
)
from airflow_roir.operators.finalize import FinalizeIndexBuildOperator
from airflow_roir.operators.partitions import AttachPartitionOperator, DetachPartitionOperator
from airflow_roir.operators.prepare import PrepareIndexBuildOperator
from airflow_roir.operators.ship import ShipChangesOperator
from airflow_roir.operators.verify import VerifyIndexOperator
from airflow_roir.option import Kind
from airflow_roir.options import LIVE_OPTIONS, WORK_OPTIONS, BuildOptions, VerifyOptions, options_of
from airflow_roir.task.ranked_indexes import ranked_indexes
from tests.airflow.test_dags import bag, rendered
from tests.airflow.test_operators import INDEX, WHAT, context
from tests.engine import steps
from tests.engine.test_bad_input import CATALOG

__all__ = ["bag", "context"]
pytestmark = pytest.mark.sample(1)

NO_NUMBER = (
    "many",
    "1.5",
    "-1000",
    "9" * 30,
    1.5,
    True,
    [2],
    {"a": 1},
    "1 2",
    "1e3",
    "2; DROP TABLE item",
    "\0",
    "٣٤٥٦٧٨٩x",
)
NO_SPAN = ("2 fortnights", "-1h", "h", "9" * 30, 1.5, True, [2], "1h; DROP TABLE item", "\0")
NO_WORD = ("nonsense", 5, ["after"], "after,none", "a;b", "\0", "'")
NO_TRUTH = ("yes, please", 2, [True], "truee", "\0", "0 ")
NO_NAME = (
    "a.b.c.d",
    "a;b c",
    '"',
    '"a',
    "x" * 64,
    '""',
    "a\0b",
    "\ud800",
    "'; DROP TABLE item; --",
    "%s",
    "$$",
    "a\nb",
    "\\",
)
NO_SPARK = (
    "sparky",
    "local[0]",
    "local[x]",
    "local[",
    "local[2,0]",
    "local-cluster[x]",
    "spark://",
    "spark://host",
    "spark://host:x",
    "sc://",
    "k8s://",
    "mesos://host:5050",
    "http",
    "warehouse; x",
    5,
    ["local"],
    "\0",
)
NO_CONNECTION = ("nowhere", "a b", 5, "'", "\0")
NO_THROTTLE = (
    "nonsense",
    "replica_lag",
    "replica_lag=1XB",
    "replica_lag=-1MB",
    "x=1",
    "commit_latency=ms",
    "a=b=c",
    5,
    "\0",
)
NO_WINDOWS = (
    "nonsense",
    "* * * * *",
    "0 22 * * 1-5 for 99d in Nowhere/City",
    "61 22 * * * for 1h",
    5,
    "0 22 * * * for",
    "\0",
)
WORK: Mapping[str, Any] = {
    "throttle": NO_THROTTLE,
    "windows": NO_WINDOWS,
    "max_duration_s": NO_SPAN,
    "priority": ("high", "101", 1.5, True, [2], "\0"),
    "warn_after_s": NO_SPAN,
    "abort_after_s": NO_SPAN,
}
NO_VALUE = {Kind.NUMBER: NO_NUMBER, Kind.SPAN: NO_SPAN, Kind.TRUTH: NO_TRUTH}
# A new index may have any name that can be one.
NAMES = ("%s", "$$", "\\")
WHERE: Mapping[str, Any] = {
    "index": (*(one for one in NO_NAME if one not in NAMES), "", " ", None, 5),
    "postgres_conn_id": NO_CONNECTION,
}
ONES: Mapping[str, Any] = {
    "covering": NO_WORD,
    "verify": NO_WORD,
    "scan": NO_WORD,
    "on_duplicate": NO_WORD,
    "table": NO_NAME,
    "keys": (
        *NO_NAME,
        "",
        "kind,,price",
        "kind kind",
        "lower(kind)",
        "nowhere",
        "kind,kind",
        ["kind", ""],
        5,
        {"a": 1},
        [5],
    ),
    "include": (*NO_NAME, "kind", "id", "nowhere", ",", ["price", ""]),
    "shards": (5, [5], "nowhere", "a b", '"', "a,a", "\0", ["x", ""]),
    "shard_column": ("s", '"'),
    "spark": NO_SPARK,
    "replica_conn_ids": (("nowhere",), ("warehouse", "nowhere")),
}
PREPARE: Mapping[str, Any] = {
    **WHERE,
    **{one.name: NO_VALUE[one.kind] for one in options_of(BuildOptions) if one.offered and one.kind in NO_VALUE},
    **dict.fromkeys(preparing.UNIQUENESS, NO_TRUTH),
    **WORK,
    **ONES,
}
VERIFY: Mapping[str, Any] = {
    **WHERE,
    **WORK,
    "parallelism": NO_NUMBER,
    "sample": ("many", "-1", 0, 101, "1%x", [2], "nan", "inf", "\0"),
    "max_seconds": NO_SPAN,
    "slices": NO_NUMBER,
    "repair": NO_TRUTH,
    "amcheck": NO_TRUTH,
    "mode": NO_WORD,
    "spark": NO_SPARK,
}
COMPACT: Mapping[str, Any] = {
    **WHERE,
    **WORK,
    "parallelism": NO_NUMBER,
    "budget": ("much", "-1GB", "1 fortnight", 5.5, [2], "\0"),
    "segment_size": ("much", "-1GB", "1h", [2], "\0"),
    "exact": NO_TRUTH,
    "verify": NO_TRUTH,
    "even_if_rebuild_is_cheaper": NO_TRUTH,
    "spark": NO_SPARK,
}
LIVE: Mapping[str, Any] = {
    **WHERE,
    **{name: WORK.get(name, NO_NUMBER) for name in LIVE_OPTIONS},
}
TABLES: Mapping[str, Any] = {
    "table": (*NO_NAME, "", " ", "nowhere", 5, None),
    "partition": (*NO_NAME, "", " ", "nowhere", 5, None),
    "bounds": ("", " ", None, 5, ["DEFAULT"], "nonsense", "DEFAULT; DROP TABLE item", "\0", "\ud800"),
    "postgres_conn_id": NO_CONNECTION,
}
TASK: Mapping[str, Any] = {
    **WHERE,
    # A number that is none of this index's, too.
    "operation_id": (*NO_NUMBER, "0", 99),
    "replica_conn_ids": (("nowhere",), ("warehouse", "nowhere")),
}
SHIP: Mapping[str, Any] = {
    "postgres_conn_id": NO_CONNECTION,
    **dict.fromkeys(("ship_for", "warn_age"), (*NO_SPAN, -1)),
    # A threshold that is never reached is no wrong value.
    "warn_rows": [one for one in NO_NUMBER if one != "9" * 30],
}
BUILD = {**WHAT, "table": "item", "keys": "kind", "include": "price", "batch_rows": "1000", "max_lag_s": ""}
ATTACH = {"table": "item", "partition": "item", "bounds": "DEFAULT", "postgres_conn_id": "warehouse"}
CASES: dict[str, tuple[Callable[..., Any], Mapping[str, Any], Mapping[str, Any]]] = {
    "prepare": (PrepareIndexBuildOperator, BUILD, PREPARE),
    # It adopts what the first one has prepared.
    "prepare again": (PrepareIndexBuildOperator, BUILD, PREPARE),
    "build": (BuildIndexOperator, WHAT, {**TASK, "spark": NO_SPARK}),
    "finalize": (FinalizeIndexBuildOperator, WHAT, TASK),
    "verify": (VerifyIndexOperator, WHAT, VERIFY),
    "compact": (CompactIndexOperator, WHAT, COMPACT),
    "change": (ChangeIndexBuildOperator, {**WHAT}, LIVE),
    "resume": (ResumeIndexBuildOperator, {**WHAT}, LIVE),
    "pause": (PauseIndexBuildOperator, WHAT, {**WHERE, "reason": ("\0", "\ud800")}),
    "abort": (AbortIndexBuildOperator, WHAT, {**WHERE, "reason": ("\0", "\ud800")}),
    "revert": (RevertIndexOperator, WHAT, WHERE),
    "attach": (AttachPartitionOperator, ATTACH, TABLES),
    "detach": (
        DetachPartitionOperator,
        {"partition": "item", "postgres_conn_id": "warehouse"},
        {name: TABLES[name] for name in ("partition", "postgres_conn_id")},
    ),
    "ship": (ShipChangesOperator, {"ship_for": "0", "postgres_conn_id": "warehouse"}, SHIP),
    "clean up": (CleanUpIndexesOperator, {}, {"postgres_conn_id": NO_CONNECTION}),
}
assert set(WORK) == set(WORK_OPTIONS)
# With an operation to give them to, which is paused but for the tasks that drive it; else with a published index.
PAUSED = ("change", "resume", "pause", "abort", "prepare again")
LIVING = (*PAUSED, "build", "finalize")


@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name, (_, _, all_) in CASES.items() for option in all_]
)
def test_a_wrong_value_is_refused_before_the_first_change(
    context: dict[str, Any], shop: Any, name: str, option: str
) -> None:
    """Found: `ship_for` of `ship_changes` could be any number of seconds: a run with some digits too many shipped for
    good; `warn_rows="2h"` was 7,200 rows, and a negative one always warned. It holds: a duration is at most a year, and
    a number of rows is a number. Found: a wrong *Spark*, or a connection of a replica that isn't there, failed in the
    task *build*, when the capture had begun. It holds: prepare looks at both; so do the commands at `--master` and
    Java. Found: a NUL or half of a UTF-16 sign in a reason, in bounds or in another text ended a task or a command by a
    traceback. It holds: one sentence.
    """
    operator, right, wrong = CASES[name]
    if name in LIVING:
        PrepareIndexBuildOperator(task_id="prepare", **BUILD).execute(context)  # type: ignore[arg-type]
        if name in PAUSED:
            requests.pause(shop.database, INDEX, "somebody")
    elif name not in ("prepare", "attach", "detach"):
        steps.make_index(shop.database, INDEX, "public.item", "kind")
    before = shop.run(CATALOG)
    for value in wrong[option]:
        with pytest.raises((AirflowException, ValueError, TypeError)) as refused:
            operator(task_id="task", **{**right, option: value}).execute(context)
        case = f"{name}, {option}={value!r}: {refused.value!r}"
        assert isinstance(refused.value, AirflowFailException), case
        assert "\n" not in str(refused.value), case
        assert shop.run(CATALOG) == before, case


FORMS: dict[str, Mapping[str, Any]] = {
    "rebuild_index": {**PREPARE, "where": ("price >", "nowhere > 0", "random() > 0.5", "price", 5, "\0", "\ud800")},
    "verify_index": VERIFY,
    "control_index": {**LIVE, "action": (*NO_WORD, "drop"), "reason": ("\0", "\ud800", 5)},
    "keep_indexes_young": {
        **COMPACT,
        "indexes": (*([one] for one in WHERE["index"] if one not in ("", " ", None)), "a", 5),
        "exact": NO_TRUTH,
        "budget_of_index": COMPACT["budget"],
        "budget_of_run": COMPACT["budget"],
    },
    "ship_changes": SHIP,
    "clean_up_indexes": {"postgres_conn_id": NO_CONNECTION},
}
FIELDS = [(name, field) for name, form in FORMS.items() for field in form]


def test_each_field_of_each_form_is_here(bag: DagBag) -> None:
    shipped = {name: set(bag.dags[name].params) for name in FORMS}
    assert {name: fields - set(FORMS[name]) for name, fields in shipped.items()} == {name: set() for name in FORMS}


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_a_wrong_field_of_a_form_is_refused_before_the_first_change(
    bag: DagBag, context: dict[str, Any], shop: Any, name: str, field: str
) -> None:
    """By the form itself, or by the first task that does anything."""
    dag = bag.dags[name]
    if field not in dag.params:
        pytest.skip("the form doesn't have it")
    form: dict[str, Any] = {"index": INDEX} if "index" in dag.params else {}
    young = name == "keep_indexes_young"
    tasks = [one for one in dag.task_ids if one != "choose"]
    if name == "rebuild_index":
        form |= {"table": "item", "keys": "kind", "include": "price"}
        tasks = ["verify_before", "prepare"]
    elif name == "control_index":
        PrepareIndexBuildOperator(task_id="prepare", **BUILD).execute(context)  # type: ignore[arg-type]
        requests.pause(shop.database, INDEX, "somebody")
        tasks = ["pause", "abort"] if field == "reason" else ["change", "resume"]
    else:
        steps.make_index(shop.database, INDEX, "public.item", "kind")
    before = shop.run(CATALOG)
    for value in FORMS[name][field]:
        conf = {"postgres_conn_id": "warehouse", **form, field: value}
        for one in tasks:
            with pytest.raises((ParamValidationError, AirflowException)) as refused:
                first_of_nights(dag, context, conf) if young else rendered(dag, one, **conf).execute(context)
            case = f"{name}, {one}, {field}={value!r}: {refused.value!r}"
            assert isinstance(refused.value, ParamValidationError | AirflowFailException), case
            assert shop.run(CATALOG) == before, case


def first_of_nights(dag: DAG, context: dict[str, Any], conf: dict[str, Any]) -> None:
    """The task `choose`, on which all later ones depend."""
    form = deepcopy(dag.params)
    form.update(conf)
    ranked_indexes(form.validate(), context["ti"])


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("option", LIVE_OPTIONS)
@pytest.mark.parametrize("operator", [BuildIndexOperator, VerifyIndexOperator])
def test_a_wrong_value_in_the_task_state_store_changes_nothing(
    context: dict[str, Any], shop: Any, operator: Any, option: str
) -> None:
    """In a pause, or while the task works: the store shows what stays, and the status says what was refused."""
    if operator is BuildIndexOperator:
        number = PrepareIndexBuildOperator(task_id="prepare", **BUILD).execute(context)  # type: ignore[arg-type]
    else:
        steps.make_index(shop.database, INDEX, "public.item", "kind")
        number = record.begin(shop.database, INDEX, VerifyOptions(), "somebody", "only").operation_id
    task = operator(task_id="task", operation_id=number, **WHAT)
    if option not in task.live_options:
        pytest.skip("the task doesn't offer it")
    task.offer_live_options(context, shop.database)
    store = context["task_state_store"].values
    shown = dict(store)
    before = shop.run(f"SELECT {', '.join(LIVE_OPTIONS)} FROM roir.operation WHERE id = {number}")
    for value in LIVE[option]:
        store[option] = value
        task.offer_live_options(context, shop.database)
        case = f"{option}={value!r}"
        assert shop.run(f"SELECT {', '.join(LIVE_OPTIONS)} FROM roir.operation WHERE id = {number}") == before, case
        assert store == shown, case
        [(notice,)] = shop.run(f"SELECT notice FROM roir.operation WHERE id = {number}")
        assert option in (notice or ""), case
