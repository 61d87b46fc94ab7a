"""Turns scored candidates into preference pairs, and pairs into training rows: pure functions.

`candidates.py` reads the candidates of an episode from its steps, `pairs.py` compares those of a turn, and
`selection.py` chooses what a job trains on and makes its rows. Read `pairs.py` first.
"""
