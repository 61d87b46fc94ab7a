"""Tests that the agent may run.

python tests.py FUNCTION
"""

import sys

import calculator

CASES = {
    "add": (2, 3, 5),
    "subtract": (7, 3, 4),
    "multiply": (4, 3, 12),
    "divide": (9, 2, 4),
    "remainder": (9, 4, 1),
    "power": (2, 3, 8),
    "smallest": (4, 7, 4),
    "largest": (4, 7, 7),
}
"""Two numbers, and what the function makes of them."""

a, b, expected = CASES[sys.argv[1]]
result = getattr(calculator, sys.argv[1])(a, b)
sys.exit(f"{sys.argv[1]}({a}, {b}) is {result}, not {expected}" if result != expected else 0)
