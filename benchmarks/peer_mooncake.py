"""Mooncake's store with its master on the loopback, and the memory that it stores in in this process: its best case.

Started as ``.venv-peers/bin/python -m benchmarks.peer_mooncake POOL_GIB``, to talk to `benchmarks.peers.Worker`.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from mooncake import store as mooncake_store

from benchmarks.blocks import Blocks
from benchmarks.loopback import free_ports, start_server
from benchmarks.subject import Size, check
from benchmarks.worker import serve

_BUFFER_BYTES = 64 << 20  # for calls that bring no registered memory; none is made here


class Mooncake(Blocks):
    """``batch_put_from`` and ``batch_get_into`` with registered buffers."""

    def __init__(self, pool_gib: float) -> None:
        super().__init__()
        self._got = np.zeros(0, np.uint8)
        rpc, metadata, metrics = free_ports(3)
        command = [
            str(Path(mooncake_store.__file__).with_name("mooncake_master")),
            f"--rpc_port={rpc}",
            "--rpc_address=127.0.0.1",
            "--enable_http_metadata_server=true",
            f"--http_metadata_server_port={metadata}",
            "--http_metadata_server_host=127.0.0.1",
            "--enable_metric_reporting=false",
            f"--metrics_port={metrics}",
            "--metrics_host=127.0.0.1",
        ]
        self._master = start_server(command, [rpc, metadata])
        self._store = mooncake_store.MooncakeDistributedStore()
        said = self._store.setup(
            "127.0.0.1",
            f"http://127.0.0.1:{metadata}/metadata",
            int(pool_gib * 2**30),
            _BUFFER_BYTES,
            "tcp",
            "",
            f"127.0.0.1:{rpc}",
        )
        check(said == 0, f"its setup says {said}")

    def prepare(self, size: Size) -> list[str]:
        if self._got.nbytes:
            for buffer in (self.given, self._got):
                self._store.unregister_buffer(buffer.ctypes.data)
        steps = super().prepare(size)
        self._got = np.zeros_like(self.given)
        for buffer in (self.given, self._got):
            check(self._store.register_buffer(buffer.ctypes.data, buffer.nbytes) == 0, "can't register memory")
        return steps

    def wake(self) -> None:
        self._store.is_exist("asleep")

    def put(self) -> bool:
        done = self._store.batch_put_from(self.names, *self._pieces(self.given))
        return set(done) == {0}

    def get(self) -> Any:
        done = self._store.batch_get_into(self.names, *self._pieces(self._got))
        return [self._got] if set(done) == {self.block_bytes} else [None]

    def finish(self) -> None:
        removed = self._store.batch_remove(self.names, force=True)  # although they were read a moment ago
        check(set(removed) == {0}, "blocks can't be removed")

    def close(self) -> None:
        self._store.close()
        self._master.kill()
        self._master.wait()

    def _pieces(self, buffer: Any) -> tuple[list[int], list[int]]:
        first = buffer.ctypes.data
        addresses = [first + number * self.block_bytes for number in range(self.size.chunks)]
        return addresses, [self.block_bytes] * self.size.chunks


if __name__ == "__main__":
    serve(lambda: Mooncake(float(sys.argv[1])))
