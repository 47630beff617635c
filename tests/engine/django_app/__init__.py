"""An application of Django's with a model of an indexed table and one of its index. Importing it sets Django up."""

from __future__ import annotations

import django
from django.conf import settings
from django.db import connections
from psycopg2.extensions import parse_dsn

settings.configure(
    INSTALLED_APPS=[__name__], DATABASES={"default": {"ENGINE": "django.db.backends.postgresql"}}, USE_TZ=True
)
django.setup()


def connect_to(dsn: str) -> None:
    """From now on the application is one of this database."""
    connections.close_all()
    of_libpq = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST", "port": "PORT"}
    theirs = {of_libpq[name]: value for name, value in parse_dsn(dsn).items()}
    connections["default"].settings_dict.update(dict.fromkeys(of_libpq.values(), ""), **theirs)
