"""An HTTP server with the protocols of OpenAI, Anthropic, Ollama and llama.cpp.

run              listens, and ends gracefully
app              routes, and the way of a request to its response; guard: what each must pass before
page/            the page, static files
protocol         an `Exchange`: chat_completions, completions, responses, messages, ollama, llama_completion
ollama_paths     the models as Ollama lists them; model_facts: what they can do
engine           the server's side of the process with the models: gives each answer its events
engine_process   the models, in a child process: answers several requests at the same time
stable_prompts   leaves out what changes in system messages from request to request
read_again       tells which tokens of prompts are read again, and why
history          conversations of all protocols, also those that other servers wrote
left_out         what a model of text cannot read, as text
events           what these two tell each other
"""
