"""The ``hs-cache`` command. What it needs is checked before anything is imported that would fail without it."""

import json
import pkgutil
import sys

from hs_cache.errors import HiddenStateCacheError
from hs_cache.installation import require_installation


def main() -> None:
    """Entry point of the console script."""
    try:
        require_installation()
    except HiddenStateCacheError as error:
        if "--json" in sys.argv:
            print(json.dumps({"error": {"type": type(error).__name__, "message": str(error)}}))
        else:
            print(f"Error: {error}", file=sys.stderr)
        sys.exit(1)
    pkgutil.resolve_name("actors.commands:main")()


if __name__ == "__main__":
    main()
