"""Chats: from messages to tokens.

template: render messages with the model's chat template. conversation: messages and their tokens.
saved_chat: conversations in files. request: the tokens of a single prompt.
"""
