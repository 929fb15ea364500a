"""What must be the same on every machine: neither settings left in a shell nor CI=true change what is tested."""

import os

from hypothesis import settings

for _variable in [name for name in os.environ if name.startswith(("HS_CACHE_", "LMCACHE_"))]:
    del os.environ[_variable]

# Hypothesis picks another profile of its own when it sees CI=true; this one holds everywhere. A fixed seed keeps a red
# run reproducible, and a deadline per example would measure the machine. --hypothesis-profile=explore searches further.
settings.register_profile("hs_cache", derandomize=True, deadline=None, database=None, print_blob=True)
settings.register_profile("explore", derandomize=False, deadline=None, max_examples=1000)
settings.load_profile("hs_cache")
