"""Everything that imports torch. Knows nothing of queues, blobs or jobs' ids."""

from __future__ import annotations

import os

# Both are read when torch and its family are imported, so they are set before any file here can.
# A worker loads what it was given, or nothing.
os.environ["HF_HUB_OFFLINE"] = "1"
# On a CPU with other work to do, threads that spin while they wait for each other made the demo's
# pictures take 80 s instead of 4.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
