"""An HTTP server with the protocols of OpenAI, Anthropic and llama.cpp.

engine_process   the models, in a child process: answers several requests at the same time
engine           starts it, and gives each request its events
events           what the two tell each other
app              routes, limits, errors; the protocols are chat_completions, completions, messages, …
"""
