"""Registers the marker of the chaos test."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "chaos: kills, stops and replaces what runs, for CHAOS_SECONDS (15)")
