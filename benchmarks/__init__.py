"""Scripts that measure: `python -m benchmarks.NAME [--json] [--quick] [--save]`. Never run as tests."""
