"""Adapters to PyTorch internals: the only package that uses names and attributes that torch marks as private.

Four attributes are exempt, which have kept their names since torch 1.0: the tables of `nn.Module` (`_parameters`,
`_buffers`, `_modules`) and a tensor's `_version`. Each module states which public API is missing. All were written for
torch 2.13 and work from 2.10 on; when a release changes an internal, its adapter and its test in tests/torchkit are the
only places to edit.
"""

WRITTEN_FOR = "2.13"
"""The torch release that the adapters were written for."""
OLDEST = "2.10"
"""The oldest torch release that they work with."""
