"""nixl's API without torch, which it imports for tensor helpers alone: 3 s in each process, for nothing here.

Import this only in a process that does nothing but ask or measure nixl.
"""

from __future__ import annotations

import sys

sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # `import torch` then raises ImportError

from nixl._api import nixl_agent, nixl_agent_config  # noqa: E402

__all__ = ["nixl_agent", "nixl_agent_config"]
