"""What Tidegate does on one CUDA device, in parts that do not need each other: `make gpu`, see docs/gpu.md."""
