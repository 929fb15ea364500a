"""Support modules of ``qwen3_omni_thinker_talker.py``: a small Qwen3-Omni cut into its two stages.

Read them in this order: ``conversation`` (what is asked), ``messages`` (what crosses between the stages), ``thinker``
and ``talker`` (the stages), ``tiny_model`` (how a small one is built from the stock classes).
"""
