"""Measurements beside other systems in the same run: ``python -m benchmarks`` measures all, and `benchmarks.report`
writes down what came of it.
"""
