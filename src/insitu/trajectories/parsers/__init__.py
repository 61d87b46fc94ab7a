"""From the steps that a framework's callbacks push to OpenAI messages, for models that are not reached over HTTP."""
