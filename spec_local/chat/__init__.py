"""Chats: from messages to tokens, and from a session's output to the next message.

template: render messages with the model's chat template. conversation: messages and their tokens.
chat_session: generate the answers of a conversation. saved_chat: conversations in files. request: the tokens
of a single prompt.
"""
