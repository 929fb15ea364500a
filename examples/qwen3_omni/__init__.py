"""Support modules of the examples: a small Qwen3-Omni cut into its two stages.

Read them in this order: ``conversation`` (what is asked), ``messages`` (what crosses between the stages), ``thinker``
and ``talker`` (the stages of ``qwen3_omni_thinker_talker.py``), ``thinker_model``, ``talker_model``, ``kv_chunks`` and
``recent_chunks`` (what stages are made of, also in the other examples), ``tiny_model`` (how a small one is built from
the stock classes).
"""
