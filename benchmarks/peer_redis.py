"""Redis over the loopback address, with nothing written to disk.

Started as ``.venv-peers/bin/python -m benchmarks.peer_redis POOL_GIB``, to talk to `benchmarks.peers.Worker`.
"""

import shutil
import sys
import tempfile
from typing import Any

import numpy as np
import redis
from redis.utils import HIREDIS_AVAILABLE

from benchmarks.blocks import Blocks
from benchmarks.loopback import free_ports, start_server
from benchmarks.subject import check
from benchmarks.worker import serve


class Redis(Blocks):
    """SETs in a pipeline, and one MGET: each the faster way here, with the faster of its two parsers and packers.

    Hiredis parses replies faster, but packs what is sent in one more copy than redis-py's own packer.
    """

    def __init__(self, pool_gib: float) -> None:
        super().__init__()
        check(HIREDIS_AVAILABLE, "hiredis is not installed")
        server = shutil.which("redis-server")
        check(server, "redis-server is not installed (Debian's package redis-server)")
        (port,) = free_ports(1)
        self._folder = tempfile.mkdtemp(prefix="hs")
        limits = ["--maxmemory", str(int(pool_gib * 2**30)), "--maxmemory-policy", "allkeys-lru"]
        where = ["--bind", "127.0.0.1", "--port", str(port), "--dir", self._folder]
        self._server = start_server([str(server), *where, *limits, "--save", "", "--appendonly", "no"], [port])
        self._writer = _connect(port, redis._parsers._RESP2Parser)
        self._reader = _connect(port, redis._parsers._HiredisParser)

    def wake(self) -> None:
        for connection in (self._writer, self._reader):
            connection.ping()

    def put(self) -> bool:
        pipeline = self._writer.pipeline(transaction=False)
        for number, name in enumerate(self.names):
            block = self.given[number * self.block_bytes : (number + 1) * self.block_bytes]
            pipeline.set(name, memoryview(block.data))
        return all(pipeline.execute())

    def get(self) -> Any:
        return [None if block is None else np.frombuffer(block, np.uint8) for block in self._reader.mget(self.names)]

    def finish(self) -> None:
        self._writer.delete(*self.names)

    def close(self) -> None:
        self._server.kill()
        self._server.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _connect(port: int, parser: Any) -> Any:
    pool = redis.ConnectionPool(host="127.0.0.1", port=port, protocol=2, parser_class=parser)
    return redis.Redis(connection_pool=pool)


if __name__ == "__main__":
    serve(lambda: Redis(float(sys.argv[1])))
