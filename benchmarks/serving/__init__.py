"""kvweave's server beside vLLM's and llama.cpp's: the same model, texts, client and machine."""
