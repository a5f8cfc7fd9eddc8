"""Settings that all tests share. Nothing here starts a process."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # test processes run side by side on few cores
os.environ.setdefault("HF_HUB_OFFLINE", "1")
