"""Says before a run whether it will learn, and what it will cost.

A file goes in; findings and an estimate come out. `diagnosis` plays a few rows as epoch 1 would, and trains on them in
a temporary folder. What it saw is the `Evidence` in `findings`; the other files judge it without playing anything:
`plan` (the file and its rows), `judgements` (what was played), `estimate` (time, memory and disk).
"""
