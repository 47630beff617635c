"""Plans the work of the DAG `keep_indexes_young`: the indexes to compact, in order, and rebuilds that it suggests."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow_roir.engine.compact.budget import Budget
from airflow_roir.engine.compact.ranking import rank, suggest
from airflow_roir.engine.control.live_options import check_throttle
from airflow_roir.options import CompactOptions
from airflow_roir.task.form_values import optional_text
from airflow_roir.task.open_database import open_database
from airflow_roir.task.roir_operator import failing_clearly, owner_of
from airflow_roir.task.spark_task import spark_of

if TYPE_CHECKING:
    from airflow.sdk.types import RuntimeTaskInstanceProtocol

SUGGESTIONS = "suggestions"

log = logging.getLogger(__name__)


def ranked_indexes(params: Mapping[str, Any], ti: RuntimeTaskInstanceProtocol) -> list[dict[str, str]]:
    """The arguments `index` and `budget` of the task for each index to compact, the worst index first.

    params: those of the DAG's form. Suggests a rebuild if that costs no more: in the log, in the XCom `suggestions`, in
    the table `roir.event`. Raises AirflowFailException for input that no retry can help.
    """
    with failing_clearly():
        each = Budget.parse(optional_text(params["budget_of_index"]), "budget_of_index")
        all_of_them = Budget.parse(optional_text(params["budget_of_run"]), "budget_of_run")
        names = [name for name in map(optional_text, params["indexes"] or ()) if name]
        database = open_database(params["postgres_conn_id"], "roir airflow choose")
        # Not used here, but checked before the long measuring.
        throttle, windows = (optional_text(params.get(name)) for name in ("throttle", "windows"))
        options = CompactOptions(throttle=throttle, windows=windows)
        check_throttle(database, options.throttle)
        spark_of(params.get("spark"))
        even_so = bool(params["even_if_rebuild_is_cheaper"])
        found = rank(database, names, each, all_of_them, bool(params["exact"]), even_so)
        suggestions = {index: suggest(database, index, choice, owner_of(ti)) for index, choice in found.rebuilds}
    for index, why in found.left_out:
        log.info("Index %s is left out: %s", index, why)
    for index, said in suggestions.items():
        log.warning("Index %s should rather be rebuilt: %s", index, said)
    ti.xcom_push(key=SUGGESTIONS, value=suggestions)
    for one in found.worth:
        what = "its unfinished compaction continues"
        if one.choice is not None:
            segments = len(one.choice.ordinals)
            what = f"{segments} of {one.choice.segments} segments, saves {one.gain_per_cost:,.0f} page reads for each"
        log.info("Index %s, budget %s: %s", one.index, one.budget, what)
    return [{"index": one.index, "budget": one.budget.exact} for one in found.worth]
