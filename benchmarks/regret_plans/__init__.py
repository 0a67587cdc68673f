"""Parts of benchmarks/regret.py."""
