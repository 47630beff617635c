"""The shop's tables as models. Their partitions, and the tables themselves, are made by tests/client/shop.py."""

from __future__ import annotations

from django.db import models


class Order(models.Model):
    """An order, by its id alone, as most applications map it."""

    id = models.IntegerField(primary_key=True)
    created = models.DateField()
    no = models.TextField()
    customer = models.IntegerField(null=True, blank=True)
    status = models.TextField(null=True, blank=True)
    note = models.TextField(null=True, blank=True)

    class Meta:
        managed = False
        db_table = 'shop"."orders'

    def __str__(self) -> str:
        return self.no


class OrderRow(models.Model):
    """The same order by its whole primary key. Its note isn't mapped."""

    pk = models.CompositePrimaryKey("id", "created")
    id = models.IntegerField()
    created = models.DateField()
    no = models.TextField()
    customer = models.IntegerField(null=True)
    status = models.TextField(null=True)

    class Meta:
        managed = False
        db_table = 'shop"."orders'


class OrderById(models.Model):
    """The same order again, without its partition key."""

    id = models.IntegerField(primary_key=True)
    no = models.TextField()

    class Meta:
        managed = False
        db_table = 'shop"."orders'


class Payment(models.Model):
    """A payment of an order."""

    id = models.IntegerField(primary_key=True)
    order = models.ForeignKey(Order, models.CASCADE, db_constraint=False, null=True, related_name="payments")
    amount = models.IntegerField()

    class Meta:
        managed = False
        db_table = 'shop"."payments'


class BigOrder(Order):
    """An order with more, in a table of its own, which is empty until a test fills it."""

    # Else deleting an order asked for it by a join, which opens all partitions.
    order_ptr = models.OneToOneField(Order, models.DO_NOTHING, parent_link=True, primary_key=True, db_constraint=False)
    extra = models.IntegerField()

    class Meta:
        managed = False
        db_table = 'shop"."big_orders'


class Strange(models.Model):
    """A table whose keys and partitions are texts of any kind (test_django_registry.py)."""

    key = models.TextField(primary_key=True)
    value = models.IntegerField()
    part = models.TextField()

    class Meta:
        managed = False
        db_table = "strange"
