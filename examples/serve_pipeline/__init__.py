"""Qwen3-Omni's two stages behind HTTP, on Ray Serve: an ingress, thinkers and talkers, and KV that outlives replicas.

Read them in this order: ``messages`` (what crosses between the deployments), ``app`` (the ingress, and how all of it is
put together), ``thinker_stage``, ``talker_stage``, ``kv_holder``; ``load`` measures it.
"""
