"""LSTMs in half precision on a CPU.

Torch gives an LSTM to oneDNN before autocast has made its input half precision, and so does not see that oneDNN has no
such LSTM on this processor: bf16 asks for AVX-512, fp16 for more. The call then fails. Here it is computed by torch's
own operators, product by product, as GRUs are.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .called import Otherwise, as_called


@functools.cache
def onednn_lacks(dtype: torch.dtype) -> bool:
    """Whether oneDNN has no LSTM of this type on this processor."""
    if not torch.backends.mkldnn.is_available():
        return False  # torch's own operators are all there is
    asked = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    return dtype in asked and not getattr(torch.ops.mkldnn, asked[dtype])()


class ByProducts(Otherwise):
    """Around a forward: LSTMs are kept from oneDNN, and give the type that it gives. Threads may be inside at once."""

    names = as_called("lstm")
    _lock = threading.Lock()
    _inside = 0
    _before = True

    def instead(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Without oneDNN."""
        with self._without():
            return tuple(t.to(self._dtype) for t in func(*args, **kwargs))

    @classmethod
    @contextmanager
    def _without(cls) -> Iterator[None]:
        with cls._lock:
            if cls._inside == 0:
                cls._before = torch._C._get_mkldnn_enabled()
                torch._C._set_mkldnn_enabled(False)
            cls._inside += 1
        try:
            yield
        finally:
            with cls._lock:
                cls._inside -= 1
                if cls._inside == 0:
                    torch._C._set_mkldnn_enabled(cls._before)
