"""What ``benchmarks/gpu_check.py`` checks on a GPU before it measures."""
