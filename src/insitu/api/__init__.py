"""Training and evaluating from Python: `insitu.finetune`, `insitu.evaluate`, `insitu.Run`.

In: functions, rows and keywords. Out: what the file with the same settings gives. Read `calls` first.
"""
