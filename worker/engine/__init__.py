"""The GPU engine; the only package of the worker that imports torch."""

import os

# torch and transformers read both when they are imported, so they are set first.
# A worker loads local files only.
os.environ["HF_HUB_OFFLINE"] = "1"
# On a busy CPU, OpenMP threads that spin while they wait for each other made the demo's images
# take 80 s instead of 4.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
