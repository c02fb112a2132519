"""The JSON that NCCL's RAS answers. NCCL 2.28.9 forgets a comma wherever a rank is missing, before its
status: just where the answer is needed.
"""

from __future__ import annotations

import json
import re
from typing import Any

_FORGOTTEN = re.compile(r'([^\s,{\[:])(\n {0,99}")')  # a value, and on the next line another name


def read_json(text: str) -> Any:
    """Raises ValueError or RecursionError."""
    try:
        return json.loads(text)
    except ValueError:
        return json.loads(_FORGOTTEN.sub(r"\1,\2", text))
