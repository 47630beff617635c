"""Describes this package to Airflow (entry point `apache_airflow_provider`)."""

from __future__ import annotations

from typing import Any

INTEGRATION = "PostgreSQL indexes"


def get_provider_info() -> dict[str, Any]:
    """The provider's description, as Airflow's `provider_info.schema.json` wants it."""
    return {
        "package-name": "airflow-provider-roir",
        "name": "Resumable online index builds",
        "description": "Resumable online index builds for PostgreSQL, run by Airflow, on Spark.\n",
        "integrations": [
            {
                "integration-name": INTEGRATION,
                "external-doc-url": "https://www.postgresql.org/docs/current/indexes.html",
                "tags": ["software"],
            }
        ],
        "operators": [
            {
                "integration-name": INTEGRATION,
                "python-modules": [
                    "airflow_roir.operators.prepare",
                    "airflow_roir.operators.build",
                    "airflow_roir.operators.finalize",
                    "airflow_roir.operators.verify",
                    "airflow_roir.operators.compact",
                    "airflow_roir.operators.control",
                    "airflow_roir.operators.clean_up",
                    "airflow_roir.operators.ship",
                    "airflow_roir.operators.partitions",
                ],
            }
        ],
        "hooks": [{"integration-name": INTEGRATION, "python-modules": ["airflow_roir.hooks.roir"]}],
        "asset-uris": [{"schemes": ["roir"], "handler": "airflow_roir.assets.normalize_uri"}],
        "extra-links": [
            "airflow_roir.links.buttons.LiveOptionsLink",
            "airflow_roir.links.buttons.IndexBuildLink",
        ],
        "config": {
            "roir": {
                "description": "The pages Index build and Indexes; what triggering a run may name.",
                "options": {
                    "dag_id": {
                        "description": "The DAG that builds. Who may read its runs reads the page Indexes, whose "
                        "button Rebuild triggers it.\n",
                        "version_added": None,
                        "type": "string",
                        "example": None,
                        "default": "rebuild_index",
                    },
                    "connections": {
                        "description": "Ids of the connections whose databases tasks and pages may reach, separated by "
                        "commas. Empty: tasks reach any connection of type postgres, and the pages "
                        "show those that runs of the DAGs have named.\n",
                        "version_added": None,
                        "type": "string",
                        "example": "warehouse, shop",
                        "default": "",
                    },
                    "spark_masters": {
                        "description": "Addresses of Spark that the form's field Spark and the operators take besides "
                        "local, local[n] and ids of connections, separated by blanks. Each gets the DSNs of the "
                        "databases.\n",
                        "version_added": None,
                        "type": "string",
                        "example": "spark://spark-master:7077 yarn",
                        "default": "",
                    },
                },
            }
        },
    }
