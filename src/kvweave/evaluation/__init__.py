"""Data sets, metrics and reports that measure what reuse costs in answer quality and saves in time."""
