"""The package's metadata for Airflow: the provider and its assets."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import urlsplit

import airflow
import jsonschema
import pytest
from airflow.sdk import Asset
from airflow.sdk.module_loading import import_string

from airflow_roir.assets import index_asset, index_uri, normalize_uri
from airflow_roir.errors import InvalidInput
from airflow_roir.provider import get_provider_info


def test_the_provider_validates_against_airflows_schema() -> None:
    schema = Path(airflow.__file__).parent / "provider_info.schema.json"
    jsonschema.validate(get_provider_info(), json.loads(schema.read_text()))


def test_the_installed_entry_point_is_this_function() -> None:
    points = entry_points(group="apache_airflow_provider")
    assert [p.load() for p in points if p.value.startswith("airflow_roir.")] == [get_provider_info]


def test_all_that_is_named_exists() -> None:
    info = get_provider_info()
    for kind in ("operators", "hooks"):
        for part in info[kind]:
            assert part["integration-name"] == info["integrations"][0]["integration-name"]
            for module in part["python-modules"]:
                import_module(module)
    for name in [*info["extra-links"], *(uris["handler"] for uris in info["asset-uris"])]:
        import_string(name)


@pytest.mark.parametrize(
    ("index", "uri"),
    [
        ("public.flights", "roir://warehouse/public/flights"),
        ("Flights", "roir://warehouse/public/flights"),
        ('"Weird Schema"."Order ""Items"""', "roir://warehouse/Weird%20Schema/Order%20%22Items%22"),
        ('public."a/b?c#d%e:f@g"', "roir://warehouse/public/a%2Fb%3Fc%23d%25e%3Af%40g"),
    ],
)
def test_an_index_has_one_address(index: str, uri: str) -> None:
    assert index_uri(index, "warehouse") == uri
    # As Airflow normalises it on both sides, the one that emits and the one that follows.
    assert index_asset(index, "warehouse").uri == uri
    assert Asset(uri).uri == uri


def test_two_databases_have_two_addresses() -> None:
    assert index_asset("public.i", "a").uri != index_asset("public.i", "b").uri
    assert normalize_uri(urlsplit(index_uri("i", "conn:with@signs"))).netloc == "conn%3Awith%40signs"


@pytest.mark.parametrize("bad", ["roir:///public/i", "roir://c/i", "roir://c/public/i/j", "roir://c//i"])
def test_an_address_of_another_shape_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="roir://CONNECTION/SCHEMA/INDEX"):
        normalize_uri(urlsplit(bad))


def test_what_is_no_identifier_has_no_address() -> None:
    with pytest.raises(InvalidInput):
        index_uri("a.b.c")
