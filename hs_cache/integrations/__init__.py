"""What connects the cache to engines and frameworks: each module is optional, and needs an extra of its own."""

from hs_cache.installation import require_installation

require_installation()
