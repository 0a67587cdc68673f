"""Textbook cost models, importable: work and depth, alpha-beta, LogP and its trees, roofline, layer models.

docs/cost.md executes them. Pure formulas on schedules, links and devices; `costs` builds its estimates on them.
"""
