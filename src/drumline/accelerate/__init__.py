"""`from drumline.accelerate import Accelerator`: an Accelerate script runs on Drumline's engine with that line changed.

docs/from-accelerate.md lists what is supported; what is not, raises with the way out.
"""

from .accelerator import Accelerator as Accelerator
from .accelerator import skip_first_batches as skip_first_batches
