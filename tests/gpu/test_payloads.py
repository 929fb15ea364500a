"""Payloads whose tensors are on a GPU arrive on the CPU, as they were behind the work queued before."""

import numpy as np
import pytest
import torch

payloads = pytest.importorskip("hs_cache.payloads", reason="needs Ray, for its cloudpickle")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_tensors_of_a_gpu_arrive_on_the_cpu() -> None:
    rows = torch.randn(512, 512, device="cuda").to(torch.bfloat16)
    product = rows.float() @ rows.float()
    data = {"rows": rows, "again": rows, "columns": rows.t()[3:7], "product": product, "cpu": torch.arange(5)}
    payload = payloads.pack(data)
    memory = np.empty(payload.nbytes, np.uint8)
    payload.write(memory)
    arrived = payloads.unpack(memory)
    assert arrived["again"] is arrived["rows"]
    for name, given in data.items():
        assert arrived[name].device.type == "cpu"
        assert torch.equal(arrived[name], given.cpu())
