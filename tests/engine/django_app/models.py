"""The models."""

from __future__ import annotations

from django.db import models


class Item(models.Model):
    """The indexed table's."""

    id = models.IntegerField(primary_key=True)
    k = models.TextField(null=True)
    v = models.IntegerField()
    note = models.TextField(default="")

    class Meta:
        db_table = "t"


class ByKey(models.Model):
    """The index's, as `inspectdb --include-views` prints it."""

    id = models.IntegerField(primary_key=True)
    k = models.TextField(null=True)
    v = models.IntegerField()

    class Meta:
        managed = False
        db_table = "ix"
