"""A Django project with an application of the shop's tables (tests/client/shop.py), and the admin."""
