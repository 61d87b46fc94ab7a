"""One process that serves a model over an OpenAI-compatible endpoint and trains it: the engine and the learner."""
