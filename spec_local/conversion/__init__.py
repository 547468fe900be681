"""Convert published heads, which are folders of safetensors, into GGUF files that llama.cpp evaluates.

Nothing but NumPy and the gguf package is needed: what a head shares with its main model, such as the tokens,
comes from the main model's GGUF file.
"""
