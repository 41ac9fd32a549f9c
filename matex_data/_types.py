"""Array types for annotations."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Integers = NDArray[np.int64]
Bools = NDArray[np.bool_]
Bytes = NDArray[np.uint8]

Remainder = Literal["drop", "pad", "keep"]
"""Treatment of the samples that do not fill a batch."""
Io = Literal["auto", "collective", "independent"]
"""How the ranks read a file."""
