"""Sets Django up, once for all tests of a process, by importing it."""

from __future__ import annotations

import os
import time
from unittest.mock import patch

import django

# Django changes the time zone of its process, which is that of other tests, too.
with patch.dict(os.environ, DJANGO_SETTINGS_MODULE="tests.client.django_shop.settings"):
    django.setup()
time.tzset()
