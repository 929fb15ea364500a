"""A subject in a process of its own, which does what lines of JSON on its standard input say: the worker's side.

Runs in every peer's environment, so it imports the standard library only.
"""

import gc
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.subject import MeasurementError, Size


def serve(make: Callable[[], Any]) -> None:
    """Make the subject, then answer until standard input ends, as it does when the driver has ended.

    A request is ``{"do": method, ...arguments}``, an answer ``{"value": ...}`` or ``{"error": text}``; the first answer
    says whether the subject could be made. Whatever else is printed goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(work: Callable[[], Any]) -> None:
        try:
            said = {"value": work()}
        except Exception as error:  # the driver decides what becomes of it
            kind = "" if isinstance(error, MeasurementError) else f"{type(error).__name__}: "
            said = {"error": f"{kind}{error}"}
        print(json.dumps(said), file=answers, flush=True)

    made: list[Any] = []

    def ready() -> None:
        made.append(make())
        gc.freeze()

    answer(ready)
    for line in sys.stdin if made else ():
        request = json.loads(line)
        method = getattr(made[0], request.pop("do"))
        if "size" in request:
            request["size"] = Size(**request["size"])
        answer(lambda: method(**request))  # noqa: B023  (called at once)
    if made:
        made[0].close()
    # Peers leave threads that crash or wait when the interpreter ends.
    os._exit(0)
