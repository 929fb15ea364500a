"""Support modules of ``vllm_style_runner.py``: the parts of an engine that know nothing of hidden states.

``scheduler`` decides who gets how many tokens of a step, ``kv_blocks`` is the prefix cache for KV, and ``clients`` are
those who ask, go on talking, and sometimes hang up.
"""
