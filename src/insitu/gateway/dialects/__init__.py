"""The APIs that agents use, each translated to the completions that model servers offer."""

from insitu.capture.recorder import CHAT, TEXT
from insitu.gateway.dialects.anthropic import MessagesTranslation
from insitu.gateway.dialects.base import ChatTranslation, StreamTranslator, TextTranslation, Translation
from insitu.gateway.dialects.responses import ResponsesTranslation

__all__ = ["DIALECTS", "ChatTranslation", "Dialect", "MessagesTranslation", "StreamTranslator", "Translation"]

Dialect = type[Translation]
DIALECTS: dict[str, Dialect] = {
    CHAT: ChatTranslation,
    TEXT: TextTranslation,
    "responses": ResponsesTranslation,
    "messages": MessagesTranslation,
}
"""By route below `/v1`."""
