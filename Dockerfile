# One image for every role: Airflow's components, Spark's master and workers, and `roir` itself. Driver and executors
# must run the same Python and the same PySpark, so they had better be the same files.

FROM python:3.12.12-slim-bookworm AS build
ENV UV_HTTP_TIMEOUT=300 \
    UV_COMPILE_BYTECODE=1
WORKDIR /src
COPY constraints.txt pyproject.toml ./
RUN pip install --no-cache-dir -c constraints.txt uv \
 && python -m venv /opt/roir
# The dependencies change seldom and weigh a gigabyte: a layer of their own. pyproject.toml keeps pyspark-client out.
RUN uv pip install --no-cache --python /opt/roir/bin/python -c constraints.txt -r pyproject.toml --group deploy
COPY LICENSE README.md ./
COPY airflow_roir airflow_roir
COPY dags dags
COPY migrations migrations
RUN uv pip install --no-cache --python /opt/roir/bin/python --no-deps .

# bookworm, because it offers Java 17.
FROM python:3.12.12-slim-bookworm
RUN mkdir -p /usr/share/man/man1 \
 && apt-get update \
 && apt-get install -y --no-install-recommends curl openjdk-17-jre-headless procps \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 50000 --gid 0 --home-dir /opt/airflow --no-create-home --shell /bin/bash airflow \
 && install -d -o airflow -g root -m 775 /opt/airflow /opt/airflow/dags /opt/airflow/logs /opt/spark/conf /opt/spark/work
COPY --from=build /opt/roir /opt/roir
# Who reaches the master's port may run code on every worker, hence the shared secret, and the encryption, since tasks
# carry a database password. Each role gets the secret as _SPARK_AUTH_SECRET, which Spark reads by itself; a driver
# insists on the setting too, which then only names the variable, so that no UI, log or command line holds the secret.
# The master's REST port would ask nobody for it: off.
RUN printf '%s\n' \
      'spark.authenticate true' \
      'spark.authenticate.secret ${env:_SPARK_AUTH_SECRET}' \
      'spark.network.crypto.enabled true' \
      'spark.master.rest.enabled false' \
      'spark.driver.bindAddress 0.0.0.0' \
    > /opt/spark/conf/spark-defaults.conf \
 && ln -s "$(/opt/roir/bin/python -c 'import pyspark, os; print(os.path.dirname(pyspark.__file__))')" /opt/spark/home
ENV PATH=/opt/roir/bin:$PATH \
    AIRFLOW_HOME=/opt/airflow \
    SPARK_HOME=/opt/spark/home \
    SPARK_CONF_DIR=/opt/spark/conf \
    PYSPARK_PYTHON=/opt/roir/bin/python \
    PYTHONUNBUFFERED=1
USER airflow
WORKDIR /opt/airflow
CMD ["roir", "--help"]
