"""Measurements of kvweave. Each folder runs as ``python -m benchmarks.NAME --help``; none is part of the package."""
