"""What `hs_cache.doctor` makes of what it has found out: pure functions from facts to findings, in a fixed order."""

from collections.abc import Callable, Iterator

from hs_cache.doctor_facts import ClusterFacts, Finding
from hs_cache.doctor_paths import check_clocks, check_rows, check_speed
from hs_cache.doctor_service import (
    check_actors,
    check_carriers,
    check_kv,
    check_memory,
    check_pinned,
    check_service,
    check_settings,
    check_sharing,
)
from hs_cache.doctor_software import check_clients, check_keys, check_nodes, check_package, check_versions

_CHECKS: tuple[Callable[[ClusterFacts], Iterator[Finding]], ...] = (
    check_nodes,
    check_service,
    check_carriers,
    check_package,
    check_versions,
    check_settings,
    check_clients,
    check_keys,
    check_actors,
    check_sharing,
    check_pinned,
    check_memory,
    check_kv,
    check_rows,
    check_speed,
    check_clocks,
)


def check(facts: ClusterFacts) -> tuple[Finding, ...]:
    """All findings, in the order in which they help: what makes others follow comes first."""
    return tuple(finding for one in _CHECKS for finding in one(facts))
