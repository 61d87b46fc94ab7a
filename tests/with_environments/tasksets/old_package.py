"""A package of verifiers before 0.4."""

import verifiers as vf


def load_environment() -> vf.SingleTurnEnv:
    return vf.SingleTurnEnv()
