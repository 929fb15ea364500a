"""The service's Ray actors, thin shells around `hs_cache`, and how they are deployed."""
