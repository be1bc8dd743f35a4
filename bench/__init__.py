"""Benches: a folder for each question, run from the root of a clone as `python -m bench.QUESTION.run`; figures in results/."""
