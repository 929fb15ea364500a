"""What a run ran on, for those who read its figures."""

import os
import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import ray
import torch

import hs_cache

_ROOT = Path(__file__).parent.parent
_PACKAGES = {
    ".venv-lmcache": ("lmcache", "torch"),
    ".venv-peers": ("mooncake_transfer_engine_non_cuda", "redis", "hiredis"),
}


def machine() -> dict[str, str]:
    """The machine, and versions of what this process uses."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "machine": f"{_cpu()}, {os.cpu_count()} CPUs, {memory_gib:.0f} GiB, Linux {platform.release()}",
        "Python": platform.python_version(),
        "ray": ray.__version__,
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads",
        "numpy": np.__version__,
        "hs_cache": hs_cache.__version__,
    }


def in_a_line(rounds: int) -> str:
    """For the top of a table."""
    found = machine()
    return f"{found['machine']}; Python {found['Python']}, ray {found['ray']}, torch {found['torch']}; {rounds} rounds"


def peers() -> dict[str, str]:
    """Versions of peers in environments of their own, as far as these are there."""
    found = {}
    for environment, packages in _PACKAGES.items():
        for package in packages:
            for path in (_ROOT / environment).glob(f"lib/python3*/site-packages/{package}-*.dist-info"):
                found[f"{package}, in {environment}"] = path.name.removesuffix(".dist-info").rpartition("-")[2]
    if server := shutil.which("redis-server"):
        said = subprocess.run([server, "--version"], capture_output=True, text=True, check=True).stdout
        found["redis-server"] = next(word for word in said.split() if word.startswith("v=")).removeprefix("v=")
    return found


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
