"""Parsers of the intermediate steps of an episode into OpenAI messages, one for each framework's payloads."""
