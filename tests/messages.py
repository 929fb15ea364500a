"""What is said where something is wrong with how the cache is set up, as docs/troubleshooting.md has it.

A test compares that page with this; others provoke each of these. ``…`` stands for anything.
"""

import re

MESSAGES = {
    "no cluster": "no Ray cluster can be joined …: …",
    "token": "the Ray cluster at … wants another authentication than this process has",
    "versions": "the Ray cluster at … has other versions than this process: …",
    "left": "Ray is not initialised in this process",
    "no service": "no service named … runs in this Ray cluster",
    "no node": "service … has no node yet: …",
    "chunk size": "chunk_size: the running service … has …, config says …",
    "keeps": "service … runs already, and keeps its settings: …",
    "other settings": "the service runs with other settings: …",
    "unknown key": "unknown key … in …; did you mean …?",
    "too large": "max_hidden_state_cpu_size asks for a pool of … GiB, but … leaves … GiB",
    "limit": "cannot create a shared memory file of … bytes: …",
    "node without": "node …: ModuleNotFoundError: No module named 'hs_cache'",
    "worker without": "System error: No module named 'hs_cache'",
    "protocol": "protocol: this client speaks version …, the service version …",
    "ray": "hs_cache needs Ray … or later, …",
    "torch": "hs_cache needs PyTorch … or later, …",
    "python": "hs_cache needs Python … to …, but this is …",
    "extra": "this part of hs_cache needs its extra '…', and not all of it is in this Python …",
}


def said(name: str, text: str) -> bool:
    """Whether a text has one of the messages in it, on one line."""
    pattern = ".+".join(map(re.escape, MESSAGES[name].split("…")))
    return re.search(pattern, text) is not None
