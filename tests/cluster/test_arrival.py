"""Rows from one other node: handed out as they arrived, and the caller's own all the same."""

import pytest
import torch

from tests.cluster.children import make_rows
from tests.cluster.conftest import Connect, StartService
from tests.cluster.nodes import Nodes, client, store_on

TOKENS = range(128)
ROWS = {0: make_rows(128, 3, 512), 9: make_rows(128, 4, 1024).to(torch.bfloat16)}


@pytest.fixture
def service(nodes: Nodes, start_service: StartService) -> str:
    return start_service(node_selector="all", rpc_timeout_s=4.0)


def test_writing_into_arrived_rows_changes_nothing_for_others(connect: Connect, nodes: Nodes, service: str) -> None:
    cache = connect(service=service)
    store_on(nodes.one, client(service, cache.key_space.model), TOKENS, ROWS, 0)
    hit = cache.retrieve(TOKENS, [0, 9], wait_s=20)
    assert hit.num_tokens == 128
    assert cache.stats().zero_copy_total == 2
    again = cache.retrieve(TOKENS, [0, 9])
    for layer, rows in ROWS.items():
        assert torch.equal(hit[layer], rows)
        hit[layer].zero_()
        assert torch.equal(again[layer], rows)
        assert not hit[layer].any()
    last = cache.retrieve(TOKENS, [0, 9])
    assert all(torch.equal(last[layer], rows) for layer, rows in ROWS.items())
