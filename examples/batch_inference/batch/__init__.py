"""The parts of the batch job.

Read them in this order: ``prompts`` (what is asked), ``schedule`` (who answers what, and what happens when that fails),
``model`` (what answers: the interface, and how one's own is named), ``tiny_thinker`` (the one that comes with it),
``crew`` (the workers on Ray), ``output`` (the Parquet parts, and what was finished before), ``progress``.
"""
