"""``horovodrun`` without its check that Horovod has Gloo, for which it imports TensorFlow at every start."""

from __future__ import annotations

import sys

from horovod.runner import launch

if __name__ == "__main__":
    launch.gloo_built = lambda verbose=False: True
    sys.exit(launch.run_commandline())
