"""Turns scored candidates into preference pairs, and pairs into training rows: pure functions.

`candidates.py` reads the candidates of an episode from its steps, `pairs.py` compares those of a turn, and `rows.py`
makes the rows of a training job. Read `pairs.py` first.
"""
