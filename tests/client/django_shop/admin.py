"""Orders in the admin."""

from __future__ import annotations

from django.contrib import admin

from tests.client.django_shop.models import Order, Payment


class Payments(admin.TabularInline):
    """An order's payments, on its page."""

    model = Payment
    extra = 0


@admin.register(Order)
class Orders(admin.ModelAdmin):
    """Found by their number. A page of the list counts what it shows, not the whole table."""

    list_display = ("no", "created", "customer", "status")
    search_fields = ("no__exact",)
    show_full_result_count = False
    inlines = (Payments,)


@admin.register(Payment)
class AllPayments(admin.ModelAdmin):
    """With the order of each."""

    list_display = ("id", "order", "amount")
    list_select_related = ("order",)
    raw_id_fields = ("order",)
