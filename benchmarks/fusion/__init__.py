"""Speed of prefill, fusion and decode, side by side with transformers in one process."""
