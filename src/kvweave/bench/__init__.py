"""Load against any OpenAI-compatible server: workloads, a client that times every piece, summaries and reports."""
