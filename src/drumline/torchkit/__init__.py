"""Adapters to PyTorch internals: the only room that uses names which torch marks as private.

Each module states which public API is missing. All were written for torch 2.13 and work from 2.10 on; when a release
changes an internal, its adapter and its test in tests/torchkit are the only places to edit.
"""

WRITTEN_FOR = "2.13"
"""The torch release that the adapters were written for."""
OLDEST = "2.10"
"""The oldest torch release that they work with."""
