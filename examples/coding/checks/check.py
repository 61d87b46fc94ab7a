"""Tests that the agent does not see.

python check.py FUNCTION
"""

import os
import sys

sys.path.append(os.getcwd())  # where the agent's file is; all other modules are found before

import calculator

CASES = {
    "add": (-4, 9, 5),
    "subtract": (2, 8, -6),
    "multiply": (-5, 6, -30),
    "divide": (20, 6, 3),
    "remainder": (20, 7, 6),
    "power": (3, 4, 81),
    "smallest": (9, -2, -2),
    "largest": (9, -2, 9),
}
"""Two numbers, and what the function makes of them."""

a, b, expected = CASES[sys.argv[1]]
result = getattr(calculator, sys.argv[1])(a, b)
sys.exit(f"{sys.argv[1]}({a}, {b}) is {result}, not {expected}" if result != expected else 0)
