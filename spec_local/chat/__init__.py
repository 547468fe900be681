"""Chats: from messages to tokens.

messages: messages and tools, checked. template: render them with the model's chat template. conversation:
messages and their tokens. saved_chat: conversations in files. request: the tokens of a single prompt.
call_formats: how models write tool calls; call_reading: read those that are JSON; call_notations: others.
call_grammar: what an answer with calls may be. tool_calls: separate calls from text. tool_use: the tools of
one answer.
"""
