"""Training: from an uploaded job to new weights.

jobs         submit, watch, cancel; uploads reads and checks what is sent
lineages     the lines of weights that one loaded model begins, a learner for each
learner      weights from job to job; policy: what of them is trained; checkpoints: how they lie on disk
updates      the optimiser steps of one job; batches: rows into micro-batches; workers: micro-batches over cores
losses       the loss family as pure functions; scoring: log-probabilities of trained tokens
"""
