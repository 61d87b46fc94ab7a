"""One process that serves a model over an OpenAI-compatible endpoint and trains it.

server       puts the parts together and listens; http, openapi and options belong to it
compute      the one thread that touches the weights: sampling and training take turns in it
model        loads any Hugging Face causal language model
inference/   sampling, from a chat request to tokens and back
training/    jobs, from uploaded rows to new weights
art/         the protocols of OpenPipe ART, on the same port
"""
