"""The benchmarks behind every number this project states: `torchax bench`, or `python benchmarks/eager.py` in its repository.

A module each, with a `main` that measures both sides in one run; `common` says how.
"""
