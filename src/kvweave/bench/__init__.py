"""Load on OpenAI-compatible servers whose prompts repeat text, and what comes back: latency, throughput, token classes.

It speaks HTTP alone, so that every server is measured by the same client; it loads neither torch nor transformers.
"""
