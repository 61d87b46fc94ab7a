"""A loss, an optimizer, a schedule and a reference, which run in the backend."""

import torch


def loss(batch, settings, steepness=4.0):
    """A smooth gate in place of the clip: the gradient fades as the ratio leaves 1."""
    gate_BT = torch.sigmoid(steepness * (batch.ratio_BT - 1)) * 4 / steepness
    return -gate_BT * batch.advantage_BT, {"gate": gate_BT.detach()}


def optimizer(parameters, settings, momentum=0.9):
    return torch.optim.SGD(parameters.values(), lr=settings.learning_rate, momentum=momentum)


def schedule(part):
    return (1 - part) ** 2


def reference(weights, versions=2):
    return weights.load_version(max(0, weights.version - versions))
